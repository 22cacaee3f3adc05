/** The tab of the chat: the conversation, which grows by questions and answers, and is kept in this browser over reloads. */

import { Answer } from "./answer.js";
import { byId, make, showError } from "./common.js";
import { explored, goingOn, send as stream } from "./completion.js";
import { explore } from "./explorer.js";
import { asked } from "./request.js";
import { begin, drop, isRunning } from "./run.js";

const NAME = "attend.chat";
/** How near to its end the conversation is still followed, in pixels. */
const NEAR = 48;
/** The conversation: {message, element, answer}. What a tool gave back has no element of its own; an answer of which nothing
 * came has no message. */
let turns = [];
/** The question that is edited. */
let edited = null;
/** Whether the view stays at the end while the conversation grows, and how far it was scrolled. */
let isFollowed = true;
let scrolled = 0;

const on = {
  choose: (answer, at, other) => {
    cut(indexOf(answer) + 1);
    run(answer, goingOn(answer, at, other));
  },
  results: (answer, results) => {
    if (ask(indexOf(answer) + 1, results)) answer.parts.settle(results);
  },
  retry: (answer) => ask(indexOf(answer), []),
  goOn: (answer) => {
    cut(indexOf(answer) + 1);
    answer.text.trim();
    guard(() => run(answer, sending(answer, messages())));
  },
  explore: (answer) => explore(explored(answer)),
};

const indexOf = (answer) => turns.findIndex((turn) => turn.answer === answer);
const messages = (before = turns.length) => turns.slice(0, before).map(({ message }) => message).filter(Boolean);

/** Do what may fail for a field that is wrong. */
function guard(work) {
  try {
    return work();
  } catch (error) {
    showError(byId("error"), error);
  }
}

/** Ask what was typed. */
export function send() {
  const content = byId("prompt").value;
  if (!content.trim() || isRunning()) return;
  if (edited === null && turns.at(-1)?.answer?.parts.ask()) {
    showError(byId("error"), new Error("The calls above wait for their results. Send these first, or choose Retry there"));
    return;
  }
  const at = edited ?? endOfAnswered();
  const open = edited === null && turns.slice(at).find(({ message }) => message);
  const question = { role: "user", content: open ? `${open.message.content}\n\n${content}` : content };
  if (!ask(at, [question])) return;
  edited = null;
  byId("prompt").value = "";
  fit();
}

/** Where a question stands that has no answer, or the end. The next is joined to it: most templates want turns. */
function endOfAnswered() {
  const last = turns.findLastIndex(({ message }) => message);
  return last >= 0 && turns[last].message.role === "user" ? last : turns.length;
}

/** Put messages at a place of the conversation, in place of what follows, and have the model answer. Whether they were sent. */
function ask(at, added) {
  return guard(() => {
    const all = [...messages(at), ...added];
    const answer = new Answer(on, { isChat: true });
    const work = sending(answer, all);
    cut(at);
    for (const message of added) put({ message });
    put({ message: null, answer });
    isFollowed = true;
    run(answer, work);
    return true;
  });
}

/** What sends a request for an answer to these messages, which is made now. */
function sending(answer, all) {
  answer.request = asked(all);
  return (signal) => stream(answer, answer.request, signal);
}

async function run(answer, work) {
  save();
  if (!await begin(answer, work)) return;
  const turn = turns[indexOf(answer)];
  if (!turn) return; // it was dropped meanwhile
  turn.message = answer.isEmpty ? null : answer.message;
  save();
}

/** Show a turn after all others. */
function put(turn) {
  const element = turn.answer?.element ?? (turn.message.role === "user" ? questionOf(turn) : null);
  turns.push(Object.assign(turn, { element }));
  if (element) byId("log").append(element);
  byId("log").hidden = false;
}

function questionOf(turn) {
  const change = make("button", { type: "button", className: "quiet", onclick: () => edit(turns.indexOf(turn)) }, "Edit");
  return make("article", { className: "question", ariaLabel: "Question" }, make("p", {}, turn.message.content), change);
}

/** Drop the turns from this one on. */
function cut(at) {
  for (const { element } of turns.splice(at)) element?.remove();
  byId("log").hidden = !turns.length;
}

/** Edit the question at a place, or none. */
function edit(at) {
  if (at !== null) byId("prompt").value = turns[at].message.content;
  else if (edited !== null) byId("prompt").value = "";
  edited = at;
  turns.forEach(({ element }, i) => element?.classList.toggle("replaced", at !== null && i >= at));
  byId("status").textContent = at === null ? "" : "Editing: what you send takes the place of the question. Esc leaves it";
  fit();
  if (at !== null) byId("prompt").focus();
}

/** Begin anew. */
export function newChat() {
  drop();
  edit(null);
  cut(0);
  save();
  showError(byId("error"), null);
  byId("prompt").focus();
}

/** Show a conversation in place of this one. */
function restore(all) {
  drop();
  edit(null);
  cut(0);
  for (const message of all) {
    if (message.role === "tool") turns.findLast(({ answer }) => answer)?.answer.parts.settle([message]);
    const answer = message.role === "assistant" ? new Answer(on, { isChat: true }) : undefined;
    put({ message, answer });
    answer?.restore(message);
  }
  if (["user", "tool"].includes(all.at(-1)?.role)) {
    const answer = new Answer(on, { isChat: true });
    put({ message: null, answer });
    answer.restore(null);
  }
  save();
  showEnd();
}

/** Keep the conversation as far as it has come, and tell that it has changed. */
function save() {
  const all = turns.map(({ message, answer }) => message ?? (answer?.isEmpty === false ? answer.message : null)).filter(Boolean);
  try {
    localStorage.setItem(NAME, JSON.stringify({ system: byId("system").value, messages: all }));
    byId("kept").textContent = "Kept in this browser until New chat.";
  } catch { // full, or forbidden
    byId("kept").textContent = "Not kept over a reload: this browser's storage is full or forbidden.";
  }
}

/** The conversation that was kept; none where there is none, or what is there is not what this page wrote. */
function kept() {
  try {
    const { system, messages: all } = JSON.parse(localStorage.getItem(NAME));
    const isText = (value) => typeof value === "string";
    const isMessage = ({ content, tool_calls: calls }) => isText(content) || Array.isArray(calls);
    return isText(system) && all.every(isMessage) ? { system, all } : null;
  } catch {
    return null;
  }
}

/** In a chat the field of the question is as high as its text. */
export function fit() {
  const field = byId("prompt");
  field.style.height = "";
  if (byId("form").classList.contains("chat")) field.style.height = `${field.scrollHeight + 2}px`;
}

/** How far the end of the conversation is below the window. */
const below = () => byId("column").getBoundingClientRect().bottom - innerHeight;

export function showEnd() {
  isFollowed = true;
  scrollBy(0, Math.max(0, below()));
}

/** Take back what was kept, and begin to listen. */
export function beginChat() {
  const before = kept();
  try {
    byId("system").value = before?.system ?? "";
    if (before) restore(before.all);
  } catch { // not what this page wrote
    newChat();
  }
  byId("new-chat").addEventListener("click", newChat);
  byId("system").addEventListener("change", save);
  byId("prompt").addEventListener("input", fit);
  byId("prompt").addEventListener("keydown", (event) => event.key === "Escape" && edited !== null && edit(null));
  addEventListener("pagehide", save);
  addEventListener("scroll", () => {
    isFollowed = below() <= NEAR || (isFollowed && scrollY >= scrolled); // only a person scrolls up
    scrolled = scrollY;
  }, { passive: true });
  byId("log").addEventListener("click", () => (isFollowed = false), { capture: true }); // what a person unfolds stays in sight
  new ResizeObserver(() => isFollowed && byId("form").classList.contains("chat") && showEnd()).observe(byId("log"));
}
