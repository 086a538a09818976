// Filters of the methods page. Without this script the form stays hidden and the table is complete.
(() => {
  const form = document.querySelector("form.filters");
  const rows = [...document.querySelectorAll("table.methods tbody tr")];
  if (!form || !rows.length) return;

  const apply = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const asked = ["family", "trained", "draft", "lossless"].map((name) => [name, form.elements[name].value]);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits =
        asked.every(([name, value]) => !value || row.dataset[name] === value) && words.every((word) => text.includes(word));
      row.hidden = !fits;
      shown += fits;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length} methods`;
  };

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  apply();
})();
