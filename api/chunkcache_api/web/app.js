/** The page: its tabs, the key, and what to say about the server. */

import { ApiError, call, forgetKey, hasKey, setKey } from "./api.js";
import { startAsk } from "./ask.js";
import { startCache } from "./cache.js";
import { startDocuments } from "./documents.js";
import { byId, count } from "./dom.js";
import { startJobs } from "./jobs.js";

const failure = byId("failure");

function report(error) {
  if (error === null) {
    failure.hidden = true;
    return;
  }
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  failure.textContent = error instanceof ApiError ? `${error.message} (${error.code})` : String(error);
  failure.hidden = false;
}

/** Runs what the user asked for, and shows it if it fails. */
function guarded(action) {
  return async (...given) => {
    report(null);
    try {
      await action(...given);
    } catch (error) {
      report(error);
    }
  };
}

const views = {
  ask: startAsk(guarded),
  documents: startDocuments(guarded),
  cache: startCache(guarded),
  jobs: startJobs(guarded),
};
const tabs = Object.keys(views).map((name) => byId(`tab-${name}`));

function show(name, { focus = false } = {}) {
  for (const tab of tabs) {
    const isIt = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(isIt));
    tab.tabIndex = isIt ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isIt;
    if (isIt && focus) tab.focus();
  }
  history.replaceState(null, "", `#${name}`);
  guarded(views[name].open)();
}

for (const tab of tabs) tab.addEventListener("click", () => show(tab.id.slice(4)));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const at = tabs.indexOf(document.activeElement);
  const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 };
  if (at < 0 || !(event.key in moves)) return;
  event.preventDefault();
  const next = tabs[(moves[event.key] + tabs.length) % tabs.length];
  show(next.id.slice(4), { focus: true });
});

const keyForm = byId("key-form");
document.addEventListener("key-wanted", () => {
  if (!keyForm.hidden) return;
  keyForm.hidden = false;
  byId("key").focus();
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  keyForm.hidden = true;
  start();
});
byId("change-key").addEventListener("click", () => {
  forgetKey();
  start();
});

async function describeServer() {
  const models = await call("GET", "v1/models");
  const [model] = models.data;
  const positions = `${count(model.max_positions)} positions`;
  byId("server").textContent = `${model.id} · ${model.family} · ${positions}`;
  byId("change-key").hidden = !hasKey();
}

async function start() {
  byId("change-key").hidden = true;
  await guarded(async () => {
    try {
      await describeServer();
    } catch (error) {
      byId("server").textContent = error.status === 401 ? "a key is needed" : "not ready";
      throw error;
    }
    const wanted = location.hash.slice(1);
    show(wanted in views ? wanted : "ask");
  })();
}

start();
