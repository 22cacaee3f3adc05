/** The tools of a chat: a JSON list, read before it is sent, how they may be called, and how much the model reasons. */

import { byId, make, showError } from "./common.js";

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

const FIELDS = ["tools", "tool_choice", "reasoning_effort"];
const REST_MS = 600;
let resting = 0;
const panel = byId("tools-panel");

/** A whole number that a JavaScript number cannot hold keeps its digits, where the browser says how it was written. */
const exact = (_, value, context) =>
  (typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source) ? BigInt(context.source) : value);

const wrong = (message) => Object.assign(new Error(message), { param: "tools" });

/** The tools that were typed. Throws an Error with `param` for what is no JSON list. */
function read() {
  const typed = byId("tools").value;
  if (!typed.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(typed, exact);
  } catch (error) {
    throw wrong(`tools is not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw wrong("tools must be a list of functions: [ ... ]");
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

function complain(name, error) {
  showError(byId(`${name}-error`), error);
  byId(name).ariaInvalid = `${Boolean(error)}`;
}

/** Take back what was said beside the fields. */
export function forgive() {
  for (const name of FIELDS) complain(name, null);
}

const fieldOf = (error) => FIELDS.find((name) => /^\w+/.exec(error.param ?? "")?.[0] === name);

/** Say an error beside the field of the panel that it names, if it names one. */
export function mark(error) {
  const name = fieldOf(error);
  if (!name) return;
  panel.open = true;
  complain(name, error);
}

/** Where the error of a request that cannot be sent is shown: beside the field that it names, which gets the focus, or above
 * the buttons. */
export function placeOf(error) {
  const name = fieldOf(error);
  if (!name) return byId("error");
  mark(error);
  byId(name).focus();
  return byId(`${name}-error`);
}

/** Bad JSON is said when the typing rests, and unsaid as soon as it is good. Said when the field is left, it would move the button that
 * is being clicked. */
function follow() {
  clearTimeout(resting);
  try {
    offer(read());
    complain("tools", null);
  } catch (error) {
    resting = setTimeout(() => complain("tools", error), REST_MS);
  }
}

for (const kind of ["input", "change"]) byId("tools").addEventListener(kind, follow);
byId("example").addEventListener("click", () => {
  byId("tools").value = EXAMPLE;
  byId("tools").dispatchEvent(new Event("change", { bubbles: true }));
  byId("tools").focus();
  byId("tools").setSelectionRange(0, 0);
  byId("tools").scrollTop = 0;
});
offer([]);
