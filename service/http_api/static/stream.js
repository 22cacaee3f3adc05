/** The stream of one answer: its events, its tokens, and the figures that follow from them. */

import { make } from "./common.js";

/** The data of each server-sent event as it comes. Comments are left out; a character may span two reads. A connection that
 * breaks ends them too: what tells a whole stream is its last event. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line === "" && data.length) yield data.splice(0).join("\n");
    }
  }
}

/** The tokens of a streamed choice in one shape, whichever route it came from; with log probabilities also
 * {text, probability, top: [text, probability]s}. */
export function tokensOf({ token_ids: ids = [], logprobs }) {
  if (!logprobs) return ids.map((id) => ({ id }));
  const rows = logprobs.content?.map((row) => [row.token, row.logprob, row.top_logprobs.map((top) => [top.token, top.logprob])])
    ?? logprobs.tokens.map((text, i) => [text, logprobs.token_logprobs[i], Object.entries(logprobs.top_logprobs[i] ?? {})]);
  return rows.map(([text, logprob, top], i) => ({ id: ids[i], ...scored(text, logprob, top) }));
}

/** A token with probabilities in place of log probabilities, its alternatives the likeliest first and itself among them. */
export function scored(text, logprob, top) {
  const all = top.some(([other]) => other === text) ? top : [...top, [text, logprob]];
  return { text, probability: Math.exp(logprob), top: all.map(([other, value]) => [other, Math.exp(value)]).sort((a, b) => b[1] - a[1]) };
}

/** What is known of a run, and its figures. Times are milliseconds of the page's clock. */
export class Run {
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

  /** Terms and descriptions for a <dl>. `seed`: as it was typed, where it was, since a JavaScript number has 53 bits. */
  figures(seed) {
    const rate = (this.tokens - this.firstTokens) / (this.lastAt - this.firstAt) * 1000;
    const pairs = {
      "First token": this.firstAt ? `${Math.round(this.firstAt - this.started)} ms` : "–",
      Speed: Number.isFinite(rate) ? `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s` : "–",
      Tokens: `${this.tokens}` + (this.promptTokens === undefined ? "" : ` after ${this.promptTokens} of the prompt`),
      Finish: this.finish ?? "–",
      Seed: seed || `${this.seed ?? "–"}`,
      Fingerprint: this.fingerprint ?? "–",
    };
    return Object.entries(pairs).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  }
}
