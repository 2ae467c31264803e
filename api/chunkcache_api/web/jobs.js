/** The view *Jobs*: pre-caching that goes on by itself, how far it is, and ending it. */

import { call } from "./api.js";
import { byId, count, el, facts, when } from "./dom.js";

const POLL_MS = 1000;
const SHOWN = 20;
const STATES = {
  queued: "waits for another job",
  running: "running",
  completed: "completed",
  failed: "failed",
  cancelled: "cancelled",
};

let run;
let timer = null;

/** What is shown, by id: a card is changed where it stands, so that nobody's focus is lost. */
const cards = new Map();

export function startJobs(guarded) {
  run = guarded;
  byId("job-start").addEventListener("click", guarded(start));
  return { open: list };
}

async function start() {
  await call("POST", "v1/precache", { body: {} });
  await list();
}

async function list() {
  clearTimeout(timer);
  const { data: jobs } = await call("GET", `v1/jobs?limit=${SHOWN}`);
  const known = new Set(jobs.map((job) => job.id));
  for (const id of cards.keys()) if (!known.has(id)) forget(id);
  for (const [at, job] of jobs.entries()) {
    if (!cards.has(job.id)) cards.set(job.id, card(job));
    const shown = cards.get(job.id);
    shown.update(job);
    const place = byId("jobs").children[at] ?? null;
    if (place !== shown.element) byId("jobs").insertBefore(shown.element, place);
  }
  const numOpen = jobs.filter(isOpen).length;
  const ended = jobs.length ? "none under way" : "no job since the server started";
  const said = numOpen ? `${count(numOpen)} under way` : ended;
  if (byId("jobs-status").textContent !== said) byId("jobs-status").textContent = said;
  if (numOpen) timer = setTimeout(refresh, POLL_MS);
}

/** Only while somebody looks; opening the view begins anew. */
function refresh() {
  if (!byId("panel-jobs").hidden) run(list)();
}

const isOpen = (job) => job.status === "queued" || job.status === "running";

function forget(id) {
  cards.get(id).element.remove();
  cards.delete(id);
}

function card({ id, created_at: createdAt, progress: { documents } }) {
  const state = el("p", {});
  const bar = el("progress", { max: Math.max(documents, 1), value: 0, "aria-label": "Documents done" });
  const numbers = el("div", {});
  const failures = el("div", {});
  const cancel = el("button", {
    type: "button",
    class: "quiet",
    "aria-label": `Cancel the job of ${when(createdAt)}`,
    text: "Cancel",
    onclick: run(async () => {
      await call("POST", `v1/jobs/${encodeURIComponent(id)}/cancel`);
      await list();
    }),
  });
  const element = el(
    "article", { class: "card" },
    el("h3", { class: "job-name", text: `Pre-caching, ${when(createdAt)}` }),
    state, bar, numbers, failures, cancel,
  );
  return {
    element,
    update(job) {
      const { progress } = job;
      state.textContent = STATES[job.status];
      bar.value = documents ? progress.done : Number(!isOpen(job));
      numbers.replaceChildren(facts([
        ["documents", `${count(progress.done)} of ${count(progress.documents)}`],
        ["chunks prefilled", count(progress.prefilled_chunks)],
        ["tokens prefilled", count(progress.prefilled_tokens)],
        ["tokens per second", progress.prefilled_tokens ? count(Math.round(progress.tokens_per_second)) : null],
        ["failed", progress.failed ? count(progress.failed) : null],
      ]));
      failures.replaceChildren(...reasons(job));
      cancel.hidden = !isOpen(job);
    },
  };
}

function reasons({ error, failures }) {
  const found = [
    ...(error === null ? [] : [`${error.message} (${error.code})`]),
    ...failures.map(({ item, code, message }) => `${item}: ${message} (${code})`),
  ];
  if (!found.length) return [];
  return [el("ul", { class: "warnings" }, ...found.map((text) => el("li", { text })))];
}
