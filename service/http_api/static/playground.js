/** The playground: one prompt, one streamed answer, and what the model thought of each token. */

import { byId, call, failure, make } from "./common.js";
import { probabilityText } from "./tokens.js";

const MAX_ALTERNATIVES = 5;
let running = null;

/** The data of each server-sent event, as it comes. Comments are left out; a character may span two reads. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line === "" && data.length) yield data.splice(0).join("\n");
    }
  }
}

/** The body of the request. An empty field is left out: the server's default holds. */
function request(chat) {
  const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (chat) body.messages = [{ role: "user", content: byId("prompt").value }];
  else body.prompt = byId("prompt").value;
  for (const id of ["temperature", "max_tokens", "top_p"]) if (byId(id).value) body[id] = Number(byId(id).value);
  const stops = byId("stop-texts").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  if (byId("logprobs").checked) Object.assign(body, chat ? { logprobs: true, top_logprobs: 5 } : { logprobs: MAX_ALTERNATIVES });
  return withSeed(JSON.stringify(body), byId("seed").value.trim());
}

/** The seed as it was typed: a JavaScript number has 53 bits, a seed 64. Anything but digits is the server's to refuse. */
function withSeed(json, seed) {
  const value = /^(-?[1-9]\d*|0)$/.test(seed) ? seed : JSON.stringify(seed);
  return seed ? json.replace(/}$/, `,"seed":${value}}`) : json;
}

/** The tokens of a streamed choice in one shape, whichever route it came from: text, probability, [text, probability]s. */
function scored({ logprobs }) {
  if (!logprobs) return [];
  const rows = logprobs.content?.map((row) => [row.token, row.logprob, row.top_logprobs.map((top) => [top.token, top.logprob])])
    ?? logprobs.tokens.map((text, i) => [text, logprobs.token_logprobs[i], Object.entries(logprobs.top_logprobs[i] ?? {})]);
  return rows.map(([text, logprob, top]) => ({
    text, probability: Math.exp(logprob), top: top.map(([other, value]) => [other, Math.exp(value)]).sort((a, b) => b[1] - a[1]),
  }));
}

/** What is known of a run, and the figures that follow from it. Times are milliseconds of the page's clock. */
class Run {
  started = performance.now();
  tokens = 0;

  /** Take in one streamed object. */
  read(chunk) {
    const now = performance.now();
    const tokens = chunk.usage?.completion_tokens ?? this.tokens;
    if (tokens && !this.firstAt) Object.assign(this, { firstAt: now, firstTokens: tokens });
    if (tokens > this.tokens) this.lastAt = now;
    Object.assign(this, { tokens, promptTokens: chunk.usage?.prompt_tokens ?? this.promptTokens });
    this.finish = chunk.choices[0]?.finish_reason ?? this.finish;
    this.seed = chunk.seed ?? this.seed;
    this.fingerprint = chunk.system_fingerprint;
  }

  figures() {
    const rate = (this.tokens - this.firstTokens) / (this.lastAt - this.firstAt) * 1000;
    return {
      "First token": this.firstAt ? `${Math.round(this.firstAt - this.started)} ms` : "–",
      Speed: Number.isFinite(rate) ? `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s` : "–",
      Tokens: `${this.tokens}` + (this.promptTokens === undefined ? "" : ` after ${this.promptTokens} of the prompt`),
      Finish: this.finish ?? "–",
      Seed: byId("seed").value.trim() || `${this.seed ?? "–"}`,
      Fingerprint: this.fingerprint ?? "–",
    };
  }
}

function showFigures(run) {
  const pairs = Object.entries(run.figures()).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  byId("figures").replaceChildren(...pairs);
}

function showError(error) {
  byId("error").hidden = !error;
  byId("error").textContent = error instanceof TypeError ? `The server did not answer: ${error.message}` : error?.message ?? "";
  if (error && !byId("key-field").hidden && !byId("key").value) byId("key").focus();
}

/** An empty place for an answer; the text of a completion goes on from its prompt. */
function openAnswer(chat) {
  byId("result").hidden = false;
  byId("answer").replaceChildren(make("span", { className: "prompt" }, chat ? "" : byId("prompt").value));
  return probabilityText(byId("answer"), byId("token"));
}

/** Show the stream of one request, to its end. */
async function follow(answer, text, run, signal) {
  for await (const data of events(answer.body)) {
    signal.throwIfAborted();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failure(chunk.error.message, answer);
    run.read(chunk);
    for (const choice of chunk.choices) text.add(choice.text ?? choice.delta.content ?? "", scored(choice));
    showFigures(run);
  }
  throw failure("The stream was cut before its end", answer);
}

async function generate(event) {
  event.preventDefault();
  running?.abort();
  const mine = running = new AbortController();
  const chat = byId("mode").value === "chat";
  const [text, run] = [openAnswer(chat), new Run()];
  showError(null);
  showFigures(run);
  setBusy(true, "Generating");
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: request(chat), signal: mine.signal };
  let ended = "Stopped";
  try {
    await follow(await call(chat ? "v1/chat/completions" : "v1/completions", options), text, run, mine.signal);
    ended = `Done: ${run.tokens} tokens, ${run.finish}`;
  } catch (error) {
    if (!mine.signal.aborted) {
      ended = "Failed";
      showError(error);
    }
  }
  mine.abort(); // whatever is left of the stream, the server need not send
  if (mine !== running) return;
  text.end();
  setBusy(false, ended);
}

function setBusy(busy, status) {
  byId("answer").ariaBusy = `${busy}`;
  byId("status").textContent = status;
  if (!busy && document.activeElement === byId("stop")) byId("generate").focus();
  byId("stop").disabled = !busy;
}

/** What the server serves; with API keys set, its second half is told only to a caller who has one. */
async function describeServer() {
  const { model, device, dtype } = await (await call("version")).json();
  byId("facts").textContent = [model, device, dtype].join(" · ");
  const { chat_template: template, model_max_length: context } = await (await call("tokenizer_info")).json();
  byId("facts").textContent = [model, device, dtype, `${context} tokens of context`].join(" · ");
  byId("mode-field").hidden = !template;
}

const describeQuietly = () => describeServer().catch(() => {}); // a call that matters shows its own error

byId("form").addEventListener("submit", generate);
byId("stop").addEventListener("click", () => running?.abort());
byId("key").addEventListener("change", describeQuietly);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});
describeQuietly();
