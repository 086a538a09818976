// The same message without and with speculation, one after the other.

import { put } from "./ask.js";
import { $, make, number, plural, say, seconds } from "./dom.js";
import { drafter, settings } from "./settings.js";
import { Answer, legend } from "./tokens.js";

class Side {
  constructor(id, name) {
    this.answer = new Answer();
    this.figures = null;
    this._values = {};
    this._legend = make("div", "foot");
    this._state = make("span", "state soft", {}, "waiting");
    const rows = [
      ["speed", "tokens/s"],
      ["round", "tokens/round"],
      ["first", "first token"],
      ["time", "total time"],
    ].map(([key, label]) => {
      this._values[key] = make("dd", "", { "data-figure": key }, "–");
      return make("div", "", {}, make("dt", "", {}, label), this._values[key]);
    });
    $(id).replaceChildren(
      make("div", "side-head", {}, make("h3", "", { id: `${id}-name` }, name), this._state),
      make("dl", "numbers", {}, ...rows),
      this.answer.element,
      this._legend,
    );
  }

  async run(body, signal) {
    this._state.textContent = "writing …";
    this.answer.element.classList.add("writing");
    try {
      this.figures = await put(body, this.answer, signal);
    } catch (error) {
      this._state.textContent = "failed";
      throw error;
    } finally {
      this.answer.element.classList.remove("writing");
    }
    const { stopped, lossy, tokens, tokensPerSecond, seconds: all, firstToken, perRound } = this.figures;
    this._state.textContent = stopped ? "stopped" : plural(tokens, "token");
    this._values.speed.textContent = number(tokensPerSecond, 1);
    this._values.time.textContent = seconds(all);
    this._values.first.textContent = seconds(firstToken);
    this._values.round.textContent = number(perRound, 2);
    this._legend.append(legend(this.answer));
    if (lossy) this._legend.append(make("p", "figures", {}, `lossy: ${lossy}`));
  }
}

// Answers a message twice and compares. Raises ApiError.
export async function compare(text, model, signal) {
  const common = { ...settings({ compare: true }), messages: [{ role: "user", content: text }] };
  const off = new Side("side-off", "Speculation off");
  const on = new Side("side-on", `Speculation on: ${drafter(model)}`);
  $("asked").textContent = text;
  $("asked").hidden = false;
  tell("Answering twice …", "First without speculation, then with it.");
  // Neither finds the prompt in the cache of prompts, where the other would have left it.
  const apart = () => ({ shared_prefix: `compare/${crypto.getRandomValues(new Uint32Array(4)).join("-")}` });
  await off.run({ ...common, ...apart(), speculation: { off: true, trace: true } }, signal);
  if (!off.figures.stopped) await on.run({ ...common, ...apart() }, signal);
  if (off.figures.stopped || on.figures.stopped) {
    tell("Stopped", "There is nothing to compare.");
    return;
  }
  tell(...verdict(off, on, common.temperature));
}

function verdict(off, on, temperature) {
  const speed = on.figures.tokensPerSecond / off.figures.tokensPerSecond;
  const title = Number.isFinite(speed)
    ? `${number(speed, 2)}× the speed: ${number(off.figures.tokensPerSecond, 1)} → ${number(on.figures.tokensPerSecond, 1)} tokens/s`
    : "The answers are too short to compare their speed";
  if (off.answer.text === on.answer.text) return [title, "The two texts are identical.", "same"];
  const tokens = common(off.answer.entries, on.answer.entries);
  const { lossy } = on.figures; // without speculation no answer is
  if (temperature > 0) {
    const greedy = lossy ? "Speculation is lossy here: with temperature 0 they may differ, too." : "With temperature 0 both are the same.";
    return [title, `The texts differ because they are sampled. ${greedy}`];
  }
  const where = `The two texts differ after ${plural(tokens, "token")}.`;
  return lossy ? [title, `${where} Speculation is lossy here, so they may.`] : [title, where, "differ"];
}

// How many tokens two answers have in common at the start.
function common(one, other) {
  const at = one.findIndex((entry, index) => entry.text !== other[index]?.text);
  return at < 0 ? one.length : at;
}

function tell(title, text, kind = "") {
  $("verdict").replaceChildren(make("h2", "", {}, title), make("p", kind, {}, text));
  say(`${title}. ${text}`);
}
