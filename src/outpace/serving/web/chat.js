// The conversation with the model.

import { put } from "./ask.js";
import { $, make, number, plural, say, seconds } from "./dom.js";
import { settings } from "./settings.js";
import { Answer, legend } from "./tokens.js";

let history = [];

export function newChat() {
  history = [];
  $("thread").replaceChildren();
  $("welcome").hidden = false;
}

// Sends a message and shows the answer as it comes. Raises ApiError, and then the message is no part of the conversation.
export async function chat(text, signal) {
  $("welcome").hidden = true;
  const answer = new Answer();
  const foot = make("div", "foot");
  const mine = make("div", "message mine", {}, make("div", "bubble", {}, text));
  const turn = make("article", "message", { "aria-label": "Answer" }, answer.element, foot);
  $("thread").append(mine, turn);
  answer.element.classList.add("writing");
  follow(true);
  const messages = [...history, { role: "user", content: text }];
  try {
    const figures = await put({ ...settings(), messages }, answer, signal, () => follow(false));
    if (answer.text) history = [...messages, { role: "assistant", content: answer.text }];
    foot.append(legend(answer), make("p", "figures", {}, summary(figures)));
    say(figures.stopped ? "The answer was stopped." : `The answer is complete: ${plural(figures.tokens, "token")}.`);
  } catch (error) {
    mine.remove();
    turn.remove();
    $("welcome").hidden = history.length > 0;
    throw error;
  } finally {
    answer.element.classList.remove("writing");
  }
  follow(false);
}

function summary(figures) {
  const parts = [
    `${number(figures.tokensPerSecond, 1)} tokens/s`,
    `${number(figures.perRound, 2)} tokens per round`,
    `first token after ${seconds(figures.firstToken)}`,
  ];
  if (figures.lossy) parts.push(`lossy: ${figures.lossy}`);
  if (figures.stopped) parts.push("stopped");
  return parts.join("  ·  ");
}

// Scrolls to the end, unless the reader has scrolled up.
function follow(always) {
  const view = $("chat");
  if (always || view.scrollHeight - view.scrollTop - view.clientHeight < 120) view.scrollTop = view.scrollHeight;
}
