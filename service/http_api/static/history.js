/** Earlier requests, in this browser's storage only: prompt, settings, tools, the turns before and the beginning of the answer, never the
 * API key. */

import { byId, make } from "./common.js";

const NAME = "attend.history";
/** How an entry is called that has no prompt. */
const RESULTS = "(results of tools)";
const MOST = 20;
const MAX_CHARACTERS = 200_000;
const ANSWER_CHARACTERS = 500;
let take = () => {};

const PLACES = ["#mode-field", "#settings", "#tools-panel"];
const SELECTOR = `#prompt, :is(${PLACES}) :is(input, select, textarea):not(#key)`;
const fields = () => [...document.querySelectorAll(SELECTOR)];
const property = ({ type }) => (type === "checkbox" || type === "radio" ? "checked" : "value");

function stored() {
  try {
    return JSON.parse(localStorage.getItem(NAME)).filter(({ form, answer, turns = [] }) =>
      typeof form.prompt === "string" && typeof answer === "string" && Array.isArray(turns));
  } catch { // nothing yet, no storage in this browser, or not what this page wrote
    return [];
  }
}

function store(entries) {
  while (JSON.stringify(entries).length > MAX_CHARACTERS) entries.pop();
  try {
    localStorage.setItem(NAME, JSON.stringify(entries));
  } catch { // full, or forbidden: history is a convenience
  }
  show();
}

/** Keep what the form holds, with prompt, turns before it and answer, before all others; the same request is kept once. */
export function remember(answer, prompt, turns = []) {
  const form = { ...Object.fromEntries(fields().map((field) => [field.id, field[property(field)]])), prompt };
  const request = (entry) => JSON.stringify([entry.form, entry.turns ?? []]);
  const others = stored().filter((entry) => request(entry) !== request({ form, turns }));
  store([{ form, turns, answer: answer.slice(0, ANSWER_CHARACTERS) }, ...others].slice(0, MOST));
}

function restore({ form, turns = [] }) {
  for (const field of fields()) {
    if (!(field.id in form)) continue;
    field[property(field)] = form[field.id];
    field.dispatchEvent(new Event("change", { bubbles: true }));
  }
  take(turns);
  byId("prompt").focus();
}

/** List what is kept, and have `ontake` told the turns of an entry that is taken back. */
export function begin(ontake) {
  take = ontake;
  show();
}

/** List what is kept. */
function show() {
  const entries = stored();
  byId("history").hidden = !entries.length;
  byId("past").replaceChildren(...entries.map((entry) => {
    const [prompt, answer] = [make("span", {}, entry.form.prompt.slice(-80) || RESULTS), make("small", {}, entry.answer.slice(0, 120))];
    return make("li", {}, make("button", { type: "button", onclick: () => restore(entry) }, prompt, answer));
  }));
}

byId("forget").addEventListener("click", () => {
  store([]);
  byId("prompt").focus();
});
