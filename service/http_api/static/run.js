/** The one call that runs, in place of the one before it. */

import { byId, showError } from "./common.js";

/** {controller, answer} */
let running = null;

export const isRunning = () => running !== null;

export const stop = () => running?.controller.abort();

/** End the call that runs, and take no more of it. */
export function drop() {
  stop();
  running = null;
  setBusy(false, "");
}

/** Run one call of an answer to its end: `work(signal)`. False where another call of the same answer took its place. */
export async function begin(answer, work) {
  stop();
  const controller = new AbortController();
  const mine = running = { controller, answer };
  let problem = null;
  showError(byId("error"), null);
  answer.start();
  setBusy(true, "Generating");
  try {
    await work(controller.signal);
  } catch (error) {
    if (!controller.signal.aborted) problem = error;
  }
  const isStopped = controller.signal.aborted;
  controller.abort(); // whatever is left of the stream, the server need not send
  if (mine !== running && running?.answer === answer) return false;
  const { tokens, finish } = answer.run;
  const ended = problem ? "Failed" : isStopped ? "Stopped" : `Done: ${tokens} tokens, ${finish}`;
  answer.end(problem, ended.toLowerCase());
  if (mine === running) {
    running = null;
    setBusy(false, ended);
    if (problem && !byId("key-field").hidden && !byId("key").value) byId("key").focus();
  }
  return true;
}

function setBusy(busy, status) {
  const [focused, generate] = [document.activeElement, byId("generate")];
  byId("status").textContent = status;
  byId("status").classList.toggle("failed", status === "Failed");
  byId("stop").disabled = !busy;
  byId("form").classList.toggle("busy", busy);
  if (!busy && focused === byId("stop")) generate.focus();
  if (busy && focused === generate && !generate.checkVisibility()) byId("stop").focus();
}
