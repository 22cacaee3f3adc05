/** What both pages share: elements made of text alone, and calls to the server that the page came from. */

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
  if (answer.status === 401) byId("key-field").hidden = false;
  const body = await answer.json().catch(() => null);
  throw failure(body?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}`, answer);
}

/** An Error that names the request, so that an operator finds it in the log. */
export function failure(message, answer) {
  const id = answer.headers.get("x-request-id");
  return new Error(id && !message.includes(id) ? `${message} (request id ${id})` : message);
}
