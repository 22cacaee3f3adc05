/** The playground: a chat or a completion, and the settings of both. */

import { beginChat, fit, send, showEnd } from "./chat.js";
import { generate, textAtHand } from "./completion.js";
import { byId } from "./common.js";
import { explore } from "./explorer.js";
import { mode } from "./request.js";
import { stop } from "./run.js";
import { begin as beginServer, describeQuietly, fail } from "./server.js";

/** The fields that a completion begins with: a chat leaves them to the model. */
const STARTS = ["prompt", "temperature", "max_tokens", "top_p"];
const isChat = () => mode() === "chat";
/** The tab that is shown. */
let tab = null;

/** Send the question, or generate a completion. A field that is wrong says so, and nothing is sent. */
function submit() {
  if (isChat()) return send();
  try {
    generate();
  } catch (error) {
    fail(error);
  }
}

/** Show the fields that the chosen tab and kind of answer have. */
function showFields() {
  const chat = isChat();
  const kind = byId("structure").selectedOptions[0];
  for (const id of ["system-field", "tools-panel", "new-chat", "kept"]) byId(id).hidden = !chat;
  byId("explore").hidden = chat;
  byId("specification-field").hidden = ["", "json_object"].includes(kind.value);
  byId("specification-name").textContent = { json: "Schema", choice: "Lines" }[kind.value] ?? "Expression";
  if (tab !== mode()) showTab(chat);
}

/** Show the tab: in a chat the conversation stands above what is typed, a completion stands below its prompt. */
function showTab(chat) {
  tab = mode();
  const [form, column, ask] = [byId("form"), byId("column"), byId("ask")];
  form.classList.toggle("chat", chat);
  if (chat) column.append(byId("log"), ask);
  form.prepend(column, ...(chat ? [] : [ask]));
  form.append(byId("settings"), byId("result"));
  for (const field of STARTS.map(byId)) {
    if (chat && field.value === field.defaultValue) field.value = "";
    else if (!chat && !field.value) field.value = field.defaultValue;
  }
  byId("prompt").placeholder = chat ? "Message" : "";
  byId("prompt").rows = chat ? 1 : 6;
  byId("prompt-label").textContent = chat ? "Message" : "Prompt";
  byId("max_tokens").placeholder = chat ? "no limit" : "16";
  byId("generate").textContent = chat ? "Send" : "Generate";
  byId("keys").textContent = chat ? "Shift + Enter breaks the line" : "Ctrl + Enter";
  fit();
  if (chat) showEnd();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", stop);
byId("explore").addEventListener("click", () => {
  try {
    explore(textAtHand());
  } catch (error) { // a field that is no number
    fail(error);
  }
});
byId("key").addEventListener("change", describeQuietly);
byId("prompt").addEventListener("keydown", (event) => {
  const isPlain = !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey;
  const isComposing = event.isComposing || event.keyCode === 229; // Enter takes what an input method offers
  if (event.key !== "Enter" || !isPlain || isComposing || !isChat()) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
document.addEventListener("change", showFields);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});
if (matchMedia("(max-width: 46rem)").matches) byId("settings").open = false;
beginChat();
showFields();
addEventListener("resize", fit); // lines break elsewhere
beginServer().then(fit); // what is hidden has no height
