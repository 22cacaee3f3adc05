/** The playground: a prompt or a conversation, a streamed answer, what else each token could have been, and where to go on. */

import { asCode } from "./code.js";
import { Parts, brief, turnItems } from "./calls.js";
import { byId, failure, post, showError } from "./common.js";
import { explore } from "./explorer.js";
import { remember, begin as beginHistory } from "./history.js";
import { asked, resumed, streamed, written } from "./request.js";
import { describeQuietly, fail } from "./server.js";
import { Run, events, scored, tokensOf } from "./stream.js";
import { TokenText, listen } from "./tokens.js";
import { forgive, placeOf } from "./tools.js";

const MOST_ALTERNATIVES = 20;
let running = null;
/** What the answer on the page is an answer to: {request, promptIds}. */
let shown = null;
/** The messages of the conversation before the one in the form. */
let turns = [];

const text = new TokenText(byId("answer"), byId("alternatives"), (at, other) => begin(() => goOn(at, other)));
const parts = new Parts(sendBack);

/** Take in the stream of one request, to its end. */
async function follow(answer, run, signal) {
  for await (const data of events(answer.body)) {
    signal.throwIfAborted();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failure(chunk.error, answer);
    run.read(chunk);
    for (const choice of chunk.choices) {
      shown.promptIds ??= choice.prompt_token_ids;
      if (choice.delta && parts.add(choice.delta)) text.pass(tokensOf(choice));
      else text.add(choice.text ?? choice.delta.content ?? "", tokensOf(choice));
    }
    showFigures(run);
  }
  throw failure({ message: "The stream was cut before its end" }, answer);
}

const showFigures = (run) => byId("figures").replaceChildren(...run.figures(byId("seed").value.trim()));

async function stream(request, run, signal) {
  await follow(await post(request.chat ? "v1/chat/completions" : "v1/completions", streamed(request), signal), run, signal);
}

/** A new answer to what the form asks for. */
function generate() {
  const request = asked(turns);
  shown = { request, promptIds: undefined };
  text.clear(request.body.prompt);
  parts.clear(Boolean(request.body.tools));
  byId("result").hidden = false;
  return (run, signal) => stream(request, run, signal);
}

/** Go on from another token at a place of the answer: what stands before it stays. */
function goOn(at, other) {
  const { request, promptIds } = shown;
  return async (run, signal) => {
    const chosen = await alternative(promptIds, text.ids.slice(0, at + 1), other, signal);
    text.replace(at, chosen, request.body.stop ?? []);
    parts.cut();
    await stream(resumed(request, promptIds, text.ids), run, signal);
  };
}

/** The token with this text that could have stood in place of the last of `ids`. The streamed alternatives have no ids. */
async function alternative(promptIds, ids, other, signal) {
  const body = { prompt: [...promptIds, ...ids], max_tokens: 0, prompt_logprobs: MOST_ALTERNATIVES };
  if (shown.request.body.model) body.model = shown.request.body.model;
  const { choices: [choice] } = await (await post("v1/completions", written(body), signal)).json();
  const all = Object.entries(choice.prompt_logprobs.at(-1)).map(([id, { decoded_token: its, logprob }]) => [its, logprob, Number(id)]);
  const found = all.find(([its]) => its === other);
  if (!found) throw new Error("This token is no longer among the server's most likely tokens");
  return { id: found[2], ...scored(found[0], found[1], all.sort((a, b) => b[1] - a[1]).slice(0, 5)) };
}

/** Run one call to its end, in place of the one that runs. `prepare` returns what is to be done with a Run and a signal. */
async function begin(prepare) {
  running?.abort();
  const mine = running = new AbortController();
  const run = new Run();
  let ended = "Stopped";
  showError(byId("error"), null);
  forgive();
  setBusy(true, "Generating");
  try {
    const work = prepare();
    showFigures(run);
    await work(run, mine.signal);
    ended = `Done: ${run.tokens} tokens, ${run.finish}`;
  } catch (error) {
    if (!mine.signal.aborted) {
      ended = "Failed";
      fail(error, placeOf(error));
    }
  }
  mine.abort(); // whatever is left of the stream, the server need not send
  if (mine !== running) return;
  text.end();
  parts.end(run.finish ?? ended.toLowerCase());
  setBusy(false, ended);
  if (run.tokens) remember(brief(parts.message(text.text)), shown.request.chat ? turns : []);
  byId("reply").hidden = !(shown?.request.chat && run.tokens) || parts.waits;
}

function setBusy(busy, status) {
  byId("answer").ariaBusy = `${busy}`;
  byId("status").textContent = status;
  if (busy) byId("reply").hidden = true;
  if (!busy && document.activeElement === byId("stop")) byId("generate").focus();
  byId("stop").disabled = !busy;
}

/** Keep the message, its answer and what follows as turns of the conversation, and make room for the next message. */
function keep(...following) {
  const before = shown.request.body.messages.filter(({ role }) => role !== "system");
  byId("prompt").value = "";
  showTurns([...before, parts.message(text.text), ...following]);
}

function reply() {
  keep();
  byId("prompt").focus();
  byId("result").hidden = true;
  shown = null;
}

/** Send back the results of an answer's calls, and have the model go on. */
function sendBack(results) {
  keep(...results);
  begin(generate);
  byId("stop").focus();
}

function showTurns(all) {
  turns = all;
  byId("conversation").hidden = !turns.length;
  byId("turns").replaceChildren(...turnItems(turns));
  showCode();
}

/** The text at hand, for the explorer: the prompt and its answer, or the prompt alone where it has none or was changed since. */
function textAtHand() {
  const { body } = asked(turns);
  const model = body.model && { model: body.model };
  const ask = ({ prompt, messages, tools, tool_choice: choice, reasoning_effort: effort }) => written([prompt, messages, tools, choice, effort]);
  if (!shown?.promptIds || ask(shown.request.body) !== ask(body)) return { ...model, prompt: byId("prompt").value };
  return { ...model, prompt: shown.promptIds, ...(text.ids.length && { answer: text.ids }) };
}

function showCode() {
  if (!byId("code").open) return;
  try {
    byId("written").textContent = asCode(byId("language").value, asked(turns));
  } catch (error) { // a field that is not done: what is wrong with it
    byId("written").textContent = error.message;
  }
}

async function copy() {
  const done = await navigator.clipboard?.writeText(byId("written").textContent).then(() => true, () => false);
  if (!done) getSelection().selectAllChildren(byId("written"));
  byId("status").textContent = done ? "Copied" : "Selected: copy it with the keyboard";
}

/** Show the fields that the chosen route and kind of answer have. */
function showFields() {
  const chat = byId("mode").value === "chat";
  const kind = byId("structure").selectedOptions[0];
  byId("prompt-label").textContent = chat ? "Message" : "Prompt";
  byId("system-field").hidden = !chat;
  byId("tools-panel").hidden = !chat;
  byId("specification-field").hidden = ["", "json_object"].includes(kind.value);
  byId("specification-name").textContent = { json: "Schema", choice: "Lines" }[kind.value] ?? "Expression";
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  begin(generate);
});
byId("form").addEventListener("change", showFields);
for (const kind of ["change", "input"]) byId("form").addEventListener(kind, showCode);
byId("code").addEventListener("toggle", showCode);
byId("stop").addEventListener("click", () => running?.abort());
byId("explore").addEventListener("click", () => {
  try {
    explore(textAtHand());
  } catch (error) { // a field that is no number, or no JSON
    fail(error, placeOf(error));
  }
});
byId("reply").addEventListener("click", reply);
byId("start-over").addEventListener("click", () => {
  showTurns([]);
  byId("prompt").focus();
});
byId("copy").addEventListener("click", copy);
byId("key").addEventListener("change", describeQuietly);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});
if (matchMedia("(max-width: 46rem)").matches) byId("settings").open = false;
listen(text);
showFields();
beginHistory(showTurns);
describeQuietly();
