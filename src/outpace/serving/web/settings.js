// The form below the message: what all requests have in common.

import { $, make } from "./dom.js";

const DEFAULT = "";
const OFF = "off:";

// Offers the drafting methods that the server has for a model.
export function offer(model) {
  const { method, methods, lossy_methods: lossy } = model.speculation;
  const before = $("method").value;
  const others = methods.filter((name) => name !== method && name !== "none");
  const shown = (name) => (lossy.includes(name) ? `${name} (lossy)` : name);
  $("method").replaceChildren(
    make("option", "", { value: DEFAULT }, `${method} (default)`),
    make("option", "", { value: OFF }, "nothing (off)"),
    make("optgroup", "", { label: "Other methods" }, ...others.map((name) => make("option", "", { value: name }, shown(name)))),
  );
  $("method").value = others.includes(before) || before === OFF ? before : DEFAULT;
}

// The fields of a request's body. `compare`: a method is wanted also where speculation is off in the form.
export function settings({ compare = false } = {}) {
  const method = $("method").value;
  const speculation = { trace: true };
  if (method === OFF && !compare) speculation.off = true;
  else if (method !== DEFAULT && method !== OFF) speculation.method = method;
  return {
    model: $("model").value,
    temperature: $("temperature").valueAsNumber,
    max_tokens: $("max-tokens").valueAsNumber,
    speculation,
  };
}

// What drafts where speculation is on, in words.
export const drafter = (model) => {
  const method = $("method").value;
  return method === DEFAULT || method === OFF ? model.speculation.method : method;
};
