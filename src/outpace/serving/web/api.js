// The server's API: models, chats as streams, metrics. The key is kept for this tab only.

const KEY = "outpace-api-key";

// An answer with an error. `status`: of HTTP; 0: the server did not answer.
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new ApiError(told?.error?.message ?? `The server answered with status ${answer.status}.`, answer.status);
  }
  return answer;
}

export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

// Streams a chat. `onChunk` gets every chunk; returns what was used. An abort by `signal` raises AbortError.
export async function streamChat(body, signal, onChunk) {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let usage = null;
  for await (const event of events(answer.body)) {
    if (event === "[DONE]") return usage;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new ApiError(chunk.error.message, 500);
    if (chunk.usage) usage = chunk.usage;
    onChunk(chunk);
  }
  throw new ApiError("The connection broke before the end of the answer.", 0);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}

const SAMPLE = /^outpace:(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Figures of one model from the metrics for Prometheus, by name; samples that differ in other labels are added up.
export async function metrics(model) {
  const text = await (await ask("metrics")).text();
  const found = new Map();
  for (const line of text.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (sample === null) continue;
    const labels = Object.fromEntries([...(sample[2] ?? "").matchAll(LABEL)].map((one) => [one[1], unescaped(one[2])]));
    if (labels.model_name !== model) continue;
    found.set(sample[1], (found.get(sample[1]) ?? 0) + Number(sample[3]));
  }
  return found;
}

const unescaped = (text) => text.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
