/** The tools of a chat: a JSON list, read before it is sent, how they may be called, and how much the model reasons. */

import { byId, make } from "./common.js";

const EXAMPLE = `[
  {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city now",
    "parameters": {"type": "object", "required": ["city", "unit"], "properties": {
      "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}}}},
  {"type": "function", "function": {
    "name": "add", "description": "The sum of two numbers",
    "parameters": {"type": "object", "required": ["a", "b"], "properties": {
      "a": {"type": "number"}, "b": {"type": "number"}}}}}
]`;
/** Before the name of a function in the values of tool_choice: a function may be called `none`. */
const ONLY = "function ";

/** A whole number that a JavaScript number cannot hold keeps its digits, where the browser says how it was written. */
const exact = (_, value, context) =>
  (typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source) ? BigInt(context.source) : value);

/** The tools that were typed. Throws an Error for what is no JSON list. */
function read() {
  const typed = byId("tools").value;
  if (!typed.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(typed, exact);
  } catch (error) {
    throw new Error(`tools is not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("tools must be a list of functions: [ ... ]");
  return tools;
}

/** The fields of the request that the panel has. What is the server's default is left out. */
export function calling() {
  const tools = read();
  const chosen = byId("tool_choice").value;
  const choice = chosen.startsWith(ONLY) ? { type: "function", function: { name: chosen.slice(ONLY.length) } } : chosen;
  const effort = byId("reasoning_effort-field").hidden ? "" : byId("reasoning_effort").value;
  return {
    ...(tools.length && { tools, ...(choice !== "auto" && { tool_choice: choice }) }),
    ...(tools.length && !byId("parallel_tool_calls").checked && { parallel_tool_calls: false }),
    ...(effort && { reasoning_effort: effort }),
  };
}

/** Offer the functions by their names; without tools there is nothing to choose. */
function offer(tools) {
  const names = new Set(tools.map((each) => each?.function?.name).filter((name) => typeof name === "string" && name));
  const kept = byId("tool_choice").value;
  byId("functions").replaceChildren(...[...names].map((name) => make("option", { value: ONLY + name }, name)));
  byId("functions").hidden = !names.size;
  byId("tool_choice").value = kept;
  if (byId("tool_choice").selectedIndex < 0) byId("tool_choice").value = "auto";
  for (const name of ["tool_choice", "parallel_tool_calls"]) byId(name).disabled = !tools.length;
}

/** Offer what is typed as soon as it is good. */
function follow() {
  try {
    offer(read());
  } catch { // said when it is sent
  }
}

for (const kind of ["input", "change"]) byId("tools").addEventListener(kind, follow);
byId("example").addEventListener("click", () => {
  byId("tools").value = EXAMPLE;
  byId("tools").dispatchEvent(new Event("change", { bubbles: true }));
});
offer([]);
