// One question to the model: the answer as it streams, and how fast it came.

import { streamChat } from "./api.js";
import { ratio } from "./dom.js";

// Fills `answer` and returns its figures; those of an answer that was stopped have `stopped`.
export async function put(body, answer, signal, onChunk = () => {}) {
  const began = performance.now();
  let first = null;
  let last = began;
  let firstTokens = 0;
  let usage = null;
  let lossy = null;
  let stopped = false;
  try {
    usage = await streamChat(body, signal, (chunk) => {
      lossy = chunk.lossy ?? lossy;
      const choice = chunk.choices[0];
      if (!choice) return;
      const before = answer.entries.length;
      answer.push(choice);
      if (answer.entries.length > before) {
        last = performance.now();
        if (first === null) [first, firstTokens] = [last, answer.entries.length];
      }
      onChunk();
    });
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    stopped = true;
  }
  const tokens = answer.entries.length;
  const ended = performance.now();
  return {
    tokens,
    stopped,
    lossy, // the lossy rule or method with its settings; null: lossless
    seconds: (ended - began) / 1000,
    firstToken: first === null ? null : (first - began) / 1000,
    // Of the tokens after the first ones, which arrive with the first round.
    tokensPerSecond: first === null ? null : ratio(tokens - firstTokens, (last - first) / 1000),
    perRound: usage?.speculation.mean_acceptance_length ?? ratio(tokens, answer.entries.at(-1)?.round ?? 0),
    cached: usage?.prompt_tokens_details.cached_tokens ?? null,
  };
}
