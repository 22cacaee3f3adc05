/** What the pages share: elements made of text alone, calls to the server that the page came from, how values are shown. */

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; a string is text, never markup. */
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** fetch, with the API key where one was typed. Throws an Error with the server's own sentence and the request's id. */
export async function call(path, options = {}) {
  const key = byId("key").value.trim();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  const body = await answer.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}`;
  throw failure({ message, param: body?.error?.param }, answer);
}

/** POST of a body that is JSON text already. */
export const post = (path, body, signal) =>
  call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });

function askForKey() {
  byId("key-field").hidden = false;
  byId("key-field").closest("details")?.setAttribute("open", "");
}

/** An Error that names the request, so that an operator finds it in the log, and as `param` the field that is wrong. */
export function failure({ message, param }, answer) {
  const id = answer.headers.get("x-request-id");
  return Object.assign(new Error(id && !message.includes(id) ? `${message} (request id ${id})` : message), { param });
}

/** The sentence for a call that failed; fetch throws a TypeError where nobody answers. */
export const sentence = (error) => (isGone(error) ? `The server did not answer: ${error.message}` : error.message);

export const isGone = (error) => error instanceof TypeError;

/** Show an error, or none, in an element with role="alert". */
export function showError(place, error) {
  place.hidden = !error;
  place.textContent = error ? sentence(error) : "";
  if (error && !byId("key-field").hidden && !byId("key").value) byId("key").focus();
}

/** Put text on the clipboard; where the browser forbids it, select the element that shows it. */
export async function copy(text, shown) {
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  if (!done) getSelection().selectAllChildren(shown);
  byId("status").textContent = done ? "Copied" : "Selected: copy it with the keyboard";
}

/** Line ends and tabs as one writes them in a string. */
export const visible = (text) => text.replace(/[\u0000-\u001f\u007f]/g, (each) => JSON.stringify(each).slice(1, -1));

/** How a token is called where its text cannot be seen: white space alone is counted. */
export const spoken = (text) => (text.trim() ? visible(text) : visible(text).replace(/ +/g, (all) => `${all.length} × space`) || "no text");

export const percent = (value) => `${(value * 100).toFixed(value < 0.0995 ? 2 : 1)} %`;

/** Texts with their probabilities as bars, the likeliest first: [text, probability] each; `row` makes an entry's element. */
export function bars(pairs, row = () => make("div")) {
  const rows = pairs.map(([text, probability], i) => {
    const bar = row(i);
    bar.classList.add("bar");
    bar.style.setProperty("--p", probability);
    bar.append(make("code", {}, visible(text)), make("span", {}, percent(probability)));
    return bar;
  });
  return make("ol", { className: "bars" }, ...rows.map((bar) => make("li", {}, bar)));
}

/** Arrow keys move the focus among the elements that `find` lists, `columns` in a row; one of them at a time is in the order of Tab. */
export function rove(place, find, columns = () => Infinity) {
  const enter = (target) => {
    place.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    target.tabIndex = 0;
  };
  place.addEventListener("focusin", ({ target }) => find().includes(target) && enter(target));
  place.addEventListener("keydown", (event) => {
    const all = find();
    const at = all.indexOf(event.target);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[event.key];
    if (at < 0 || !Number.isFinite(step)) return;
    all[at + step]?.focus();
    event.preventDefault();
  });
}
