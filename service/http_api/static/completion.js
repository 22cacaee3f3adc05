/** The tab of completions: a prompt, its answer, and where to go on. */

import { Answer } from "./answer.js";
import { byId, post } from "./common.js";
import { asked, resumed, streamed, written } from "./request.js";
import { begin } from "./run.js";
import { scored } from "./stream.js";

const MAX_ALTERNATIVES = 20;
/** The answer on the page. */
let shown = null;

const on = {
  choose: (answer, at, other) => run(answer, goingOn(answer, at, other)),
  retry: (answer) => show(answer.request),
  goOn: (answer) => run(answer, (signal) => send(answer, rest(answer), signal)),
};

/** Send a request, and take the stream into an answer. */
export async function send(answer, request, signal) {
  answer.sent = request;
  const path = request.chat ? "v1/chat/completions" : "v1/completions";
  await answer.follow(await post(path, streamed(request), signal), signal);
}

/** What was sent last, after the tokens that have come. */
const rest = ({ sent, promptIds, ids }) => ({ chat: false, body: { ...sent.body, prompt: promptIds, resume_token_ids: ids } });

/** A new answer to what the form asks for. Throws an Error for a field that is wrong. */
export const generate = () => show(asked());

function show(request) {
  const answer = shown = new Answer(on, { isChat: false });
  answer.request = request;
  answer.text.begin(request.body.prompt);
  byId("result").replaceChildren(answer.element);
  run(answer, (signal) => send(answer, request, signal));
}

const run = begin;

/** Go on from another token at a place of an answer: what stands before it stays. */
export const goingOn = (answer, at, other) => async (signal) => {
  const { request, promptIds, text, parts } = answer;
  const chosen = await alternative(answer, text.ids.slice(0, at + 1), other, signal);
  text.replace(at, chosen, request.body.stop ?? []);
  parts.cut();
  await send(answer, resumed(request, promptIds, text.ids), signal);
};

/** The token with this text that could have stood in place of the last of `ids`. The streamed alternatives have no ids. */
async function alternative({ request, promptIds }, ids, other, signal) {
  const body = { prompt: [...promptIds, ...ids], max_tokens: 0, prompt_logprobs: MAX_ALTERNATIVES };
  if (request.body.model) body.model = request.body.model;
  const { choices: [choice] } = await (await post("v1/completions", written(body), signal)).json();
  const last = Object.entries(choice.prompt_logprobs.at(-1));
  const all = last.map(([id, { decoded_token: its, logprob }]) => [its, logprob, Number(id)]);
  const found = all.find(([its]) => its === other);
  if (!found) throw new Error("This token is no longer among the server's most likely tokens");
  return { id: found[2], ...scored(found[0], found[1], all.sort((a, b) => b[1] - a[1]).slice(0, 5)) };
}

/** The text at hand, for the explorer: the prompt and its answer, or the prompt alone where it has none or was changed since. */
export function textAtHand() {
  const { body } = asked();
  const isAnswered = shown?.promptIds && shown.request.body.prompt === body.prompt && shown.request.body.model === body.model;
  return isAnswered ? explored(shown) : { ...(body.model && { model: body.model }), prompt: body.prompt };
}

/** The text of an answer, for the explorer. */
export function explored({ request, promptIds, ids }) {
  const { model } = request.body;
  return { ...(model && { model }), prompt: promptIds, ...(ids.length && { answer: ids }) };
}
