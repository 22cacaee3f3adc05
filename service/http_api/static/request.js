/** The form as a request: what a caller would send, and what the page adds to it for itself. */

import { byId } from "./common.js";
import { calling } from "./tools.js";

const ALTERNATIVES = 5;
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** A value as JSON writes it. A bigint keeps all its digits: a seed has 64 bits, a number 53. */
export function written(value) {
  if (Array.isArray(value)) return `[${value.map(written).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${written(each)}`).join(", ")}}`;
  }
  return typeof value === "string" ? JSON.stringify(value) : `${value}`;
}

/** The lines of a field, with \n, \t and \\ read as in a string. */
const lines = (field) => field.value.split("\n").filter(Boolean).map((text) => text.replace(/\\[nt\\]/g, (each) => ESCAPES[each]));

/** The parameters by their names in the API. An empty field is left out: the server's default holds. */
function parameters() {
  const set = byId("model").value ? { model: byId("model").value } : {};
  for (const field of document.querySelectorAll("#settings input[type=number]")) {
    if (field.validity.badInput) throw new Error(`${field.id} must be a number`);
    if (field.value) set[field.id] = Number(field.value);
  }
  for (const field of document.querySelectorAll("#settings [data-list]")) if (field.value.trim()) set[field.dataset.list] = lines(field);
  if (byId("ignore_eos").checked) set.ignore_eos = true;
  const seed = byId("seed").value.trim();
  if (seed) set.seed = /^-?\d+$/.test(seed) ? BigInt(seed) : seed; // anything but digits is the server's to refuse
  return { ...set, ...structure() };
}

function structure() {
  const kind = byId("structure").value;
  const value = { json_object: true, choice: lines(byId("specification")) }[kind] ?? byId("specification").value;
  return kind ? { structured_outputs: { [kind]: value } } : {};
}

/** Which tab is chosen: "chat" or "completions". */
export const mode = () => document.querySelector("[name=mode]:checked").value;

/** What the form asks for, {chat, body}: a completion of its prompt, or an answer to `messages`. */
export function asked(messages) {
  if (!messages) return { chat: false, body: { prompt: byId("prompt").value, ...parameters() } };
  const system = byId("system").value ? [{ role: "system", content: byId("system").value }] : [];
  const goesOn = messages.at(-1)?.role === "assistant" && { continue_final_message: true };
  return { chat: true, body: { messages: [...system, ...messages], ...goesOn, ...parameters(), ...calling() } };
}

/** The body with what the page needs of a stream: counts, token ids, and probabilities where they are wanted. */
export function streamed({ chat, body }) {
  const scores = chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_token_ids: true };
  return written({ ...body, ...options, ...(byId("logprobs").checked && scores) });
}

/** The same request, going on after `tokens` of its answer: a completion, of a chat too, whose prompt is known as token ids.
 * Its text is not parsed: a call in it is text. */
export function resumed({ body }, promptIds, tokens) {
  const { messages, continue_final_message, tools, tool_choice, parallel_tool_calls, reasoning_effort, ...rest } = body;
  const { max_tokens: most = tokens.length + 200, ...same } = rest;
  const length = Math.max(most, tokens.length + 1);
  return { chat: false, body: { ...same, prompt: promptIds, resume_token_ids: tokens, max_tokens: length } };
}
