// What the server does now, from its metrics: requests, memory, tokens a second, and what of the drafts is accepted.

import { metrics } from "./api.js";
import { $, draw, make, number, percent, ratio } from "./dom.js";

const EVERY = 1000;
const MINUTE = 60;
const WIDTH = 280;
const HEIGHT = 56;

const FIGURES = [
  ["accepted", "Accepted draft tokens", (of) => percent(ratio(of("spec_decode_num_accepted_tokens_total"), of("spec_decode_num_draft_tokens_total")))],
  ["length", "Mean acceptance length", (of) => number(length(of), 2)],
  ["rounds", "Rounds with a draft", (of) => percent(ratio(of("spec_decode_num_drafts_total"), of("spec_decode_num_rounds_total")))],
  ["requests", "Requests with a draft", (of) => percent(ratio(of("spec_decode_num_requests_total"), of("request_generation_tokens_count")))],
  ["tokens", "Generated tokens", (of) => number(of("generation_tokens_total"))],
];

// Tokens of a round: the accepted draft tokens, and one of the model's own.
const length = (of) => {
  const accepted = ratio(of("spec_decode_num_accepted_tokens_total"), of("spec_decode_num_rounds_total"));
  return accepted === null ? null : 1 + accepted;
};

let samples = [];
let cells = null;

function build() {
  const value = (id) => make("dd", "", { id });
  const row = (label, dd) => make("div", "", {}, make("dt", "", {}, label), dd);
  const line = draw("path", { class: "line" });
  const area = draw("path", { class: "area" });
  const rows = FIGURES.map(([key, label]) => {
    const pair = [make("td", "", { "data-figure": key }), make("td", "")];
    return [pair, make("tr", "", {}, make("th", "", { scope: "row" }, label), ...pair)];
  });
  cells = {
    line,
    area,
    figures: rows.map(([pair]) => pair),
    speed: make("strong", "speed", { id: "load-speed" }, "0"),
    peak: make("span", ""),
    running: value("load-running"),
    waiting: value("load-waiting"),
    memory: value("load-memory"),
    meter: make("meter", "", { min: 0, max: 1, high: 0.9, "aria-label": "Share of the K/V memory in use" }),
    state: make("p", "problem", { role: "status", hidden: "" }),
  };
  const chart = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": "Tokens per second in the last minute" }, area, line);
  $("load").replaceChildren(
    make("h2", "", {}, "Live load"),
    cells.state,
    make("div", "pace", {}, make("p", "", {}, cells.speed, " tokens/s"), chart, make("p", "soft axis", {}, make("span", "", {}, "one minute ago"), cells.peak, make("span", "", {}, "now"))),
    make("dl", "numbers", {}, row("running", cells.running), row("waiting", cells.waiting), row("K/V in use", cells.memory)),
    cells.meter,
    make("h2", "", {}, "Acceptance"),
    make(
      "table",
      "",
      {},
      make("thead", "", {}, make("tr", "", {}, make("td", ""), make("th", "", { scope: "col" }, "last minute"), make("th", "", { scope: "col" }, "total"))),
      make("tbody", "", {}, ...rows.map(([, tr]) => tr)),
    ),
  );
}

function show() {
  const now = samples.at(-1);
  const total = (name) => now.found.get(name) ?? 0;
  const recent = (name) => total(name) - (samples[0].found.get(name) ?? 0);
  const speeds = samples.slice(1).map((one, at) => {
    const gap = (one.at - samples[at].at) / 1000;
    return Math.max(0, (tokens(one) - tokens(samples[at])) / gap);
  });
  cells.speed.textContent = number(mean(speeds.slice(-2)));
  cells.running.textContent = number(total("num_requests_running"));
  cells.waiting.textContent = number(total("num_requests_waiting"));
  cells.memory.textContent = percent(total("kv_cache_usage_perc"));
  cells.meter.value = total("kv_cache_usage_perc");
  FIGURES.forEach(([, , figure], at) => {
    cells.figures[at][0].textContent = figure(recent);
    cells.figures[at][1].textContent = figure(total);
  });
  plot(speeds);
}

const tokens = (sample) => sample.found.get("generation_tokens_total") ?? 0;
const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : 0);

function plot(speeds) {
  const most = Math.max(1, ...speeds);
  cells.peak.textContent = `peak ${number(Math.max(0, ...speeds))}`;
  const step = WIDTH / (MINUTE - 1);
  const from = WIDTH - (speeds.length - 1) * step;
  const points = speeds.map((one, at) => `${(from + at * step).toFixed(1)} ${(HEIGHT - 2 - (one / most) * (HEIGHT - 6)).toFixed(1)}`);
  const path = points.length ? `M${points.join("L")}` : "";
  cells.line.setAttribute("d", path);
  cells.area.setAttribute("d", path && `${path}L${WIDTH} ${HEIGHT}L${from.toFixed(1)} ${HEIGHT}Z`);
}

async function look(model) {
  try {
    const found = await metrics(model);
    samples.push({ at: performance.now(), found });
    samples = samples.slice(-MINUTE - 1);
    cells.state.hidden = true;
    show();
  } catch (error) {
    cells.state.textContent = error.message;
    cells.state.hidden = false;
  }
}

// Looks once a second, while the page can be seen, at what the server does for the model that `chosen` names.
export async function watchLoad(chosen) {
  build();
  let model = null;
  for (;;) {
    if (!document.hidden) {
      if (model !== chosen()) [model, samples] = [chosen(), []];
      await look(model);
    }
    await new Promise((done) => setTimeout(done, EVERY));
  }
}
