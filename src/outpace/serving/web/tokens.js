// Answers with every token in the color of who drafted it, legends, and the note beside the pointer.

import { $, make, number, percent, plural } from "./dom.js";

export const TARGET = "target";
const COLORS = 6;
const known = new Map([[TARGET, 0]]);

// The color of a drafter, 1 to 6 in the order in which drafters appear; 0: the model itself.
function color(source) {
  if (!known.has(source)) known.set(source, 1 + ((known.size - 1) % COLORS));
  return known.get(source);
}

// The text of one answer, and what is known of its tokens.
export class Answer {
  constructor() {
    this.text = "";
    this.element = make("div", "answer");
    this.entries = [];
    this._rounds = new Map();
    this._tail = document.createTextNode(""); // text whose tokens are not known yet
    this._shown = 0;
    this.element.append(this._tail);
  }

  // Takes a chunk's choice.
  push(choice) {
    this.text += choice.delta?.content ?? "";
    for (const entry of choice.trace ?? []) this._add(entry);
    this._tail.data = this.text.slice(this._shown);
  }

  _add(entry) {
    this.entries.push(entry);
    this._rounds.set(entry.round, (this._rounds.get(entry.round) ?? 0) + 1);
    const token = make("span", `token color-${color(entry.source)}`, { "data-source": entry.source });
    token.dataset.round = entry.round;
    token.dataset.place = this._rounds.get(entry.round);
    token.textContent = entry.text;
    token.answer = this;
    this._tail.before(token);
    this._shown += entry.text.length;
  }

  // Tokens by source, the model's own first.
  counts() {
    const found = new Map([...known.keys()].map((source) => [source, 0]));
    for (const { source } of this.entries) found.set(source, found.get(source) + 1);
    return [...found].filter(([source, count]) => count > 0 || source === TARGET);
  }

  about(token) {
    const { source, round, place } = token.dataset;
    const count = this._rounds.get(Number(round));
    const who = source === TARGET ? "Chosen by the model itself" : `Drafted by ${source}`;
    return [who, `Round ${number(Number(round))}: token ${place} of ${count}`];
  }
}

// Who drafted how much of an answer.
export function legend(answer) {
  const total = answer.entries.length;
  const list = make("ul", "legend", { "aria-label": "Tokens by who drafted them" });
  for (const [source, count] of answer.counts()) {
    const name = source === TARGET ? "the model" : source;
    const swatch = make("span", `swatch color-${color(source)}`, { "aria-hidden": "true" });
    const share = make("span", "soft", {}, `${plural(count, "token")}, ${percent(total ? count / total : 0)}`);
    list.append(make("li", "", { "data-source": source }, swatch, `${name} `, share));
  }
  return list;
}

// Shows a note beside the token under the pointer, or the one that was tapped.
export function watchTokens() {
  const tip = $("tip");
  const show = (event) => {
    const token = event.target.closest?.(".token");
    if (!token?.answer) {
      tip.hidden = true;
      return;
    }
    const [who, where] = token.answer.about(token);
    const swatch = make("span", `swatch color-${color(token.dataset.source)}`);
    tip.replaceChildren(make("strong", "", {}, swatch, who), make("span", "", {}, where));
    tip.hidden = false;
    const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left), innerWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < 8 ? at.bottom + 8 : above}px`;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("click", show);
  document.addEventListener("scroll", () => (tip.hidden = true), { capture: true, passive: true });
}
