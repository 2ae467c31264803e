/** The view *Ask*: a question, its streamed answer, and what became of the prompt. */

import { call, events } from "./api.js";
import { byId, count, el, facts, milliseconds, percent } from "./dom.js";

const USES = {
  exact: "reused, exact",
  fused: "reused",
  recomputed: "recomputed",
  computed: "computed",
};
const PAGE = 50;

let running = null;
let asked = null;
let nextDocuments = null;

export function startAsk(guarded) {
  for (const radio of document.querySelectorAll("input[name=from]")) {
    radio.addEventListener("change", guarded(chooseSource));
  }
  byId("pick-more").addEventListener("click", guarded(listMore));
  byId("pick-list").addEventListener("change", showPicked);
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(ask)();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("compare").addEventListener("click", guarded(compare));
  return { open: chooseSource };
}

const picks = () => document.querySelector("input[name=from]:checked").value === "pick";
const checked = () => [...byId("pick-list").querySelectorAll("input:checked")].map((box) => box.value);

async function chooseSource() {
  byId("pick-options").hidden = !picks();
  byId("retrieve-options").hidden = picks();
  if (!picks()) return;
  const kept = new Set(checked());
  byId("pick-list").replaceChildren();
  nextDocuments = null;
  await listMore();
  for (const box of byId("pick-list").querySelectorAll("input")) box.checked = kept.has(box.value);
  showPicked();
}

async function listMore() {
  const after = nextDocuments === null ? "" : `&after=${encodeURIComponent(nextDocuments)}`;
  const page = await call("GET", `v1/documents?limit=${PAGE}${after}`);
  for (const { id, num_tokens: tokens } of page.data) {
    const box = el("input", { type: "checkbox", value: id });
    const label = el("label", {}, box, ` ${id} `, el("span", { class: "soft", text: `${count(tokens)} tokens` }));
    byId("pick-list").append(el("li", {}, label));
  }
  nextDocuments = page.next_after;
  byId("pick-more").hidden = !page.has_more;
}

function showPicked() {
  const ids = checked();
  byId("picked").textContent = ids.length ? `${count(ids.length)} picked, asked in this order` : "none picked";
}

function number(id) {
  const { value } = byId(id);
  return value === "" ? undefined : Number(value);
}

function request() {
  return {
    query: byId("question").value,
    ...(picks() ? { document_ids: checked() } : { top_k: number("top-k") ?? 6 }),
    max_tokens: number("max-tokens"),
    temperature: number("temperature") ?? 0,
    chunkcache: {
      policy: byId("policy").value || undefined,
      recompute_ratio: number("ratio"),
      verify: byId("verify").checked,
      show_prompt: true,
    },
  };
}

async function ask() {
  asked = null;
  byId("compare").hidden = true;
  byId("answers").replaceChildren();
  const body = request();
  const done = await follow(body, answerCard("Answer"));
  asked = body;
  byId("compare").hidden = done.chunkcache.policy === "full";
}

async function compare() {
  byId("compare").hidden = true;
  const exact = { policy: "full", show_prompt: true };
  await follow({ ...asked, chunkcache: exact }, answerCard("Full prefill"));
}

function answerCard(title) {
  const card = el(
    "article",
    { class: "card" },
    el("h2", { text: title }),
    el("p", { class: "soft state", role: "status", text: "waiting for the first token …" }),
    el("p", { class: "answer-text busy", "aria-live": "polite", "aria-busy": "true" }),
    el("div", { class: "report" }),
  );
  byId("answers").append(card);
  return card;
}

/** Streams one answer into a card; gives the response at its end. */
async function follow(body, card) {
  const [state, text, report] = ["state", "answer-text", "report"].map((c) => card.querySelector(`.${c}`));
  running?.abort();
  const controller = new AbortController();
  running = controller;
  byId("stop").hidden = false;
  byId("ask").disabled = true;
  const began = performance.now();
  let seen = null;
  try {
    for await (const event of events("v1/query", body, controller.signal)) {
      if (event.type === "response.output_text.delta") {
        if (seen === null) {
          seen = performance.now() - began;
          state.textContent = `first token after ${milliseconds(seen)}`;
        }
        text.append(event.delta);
      } else if (event.type === "response.completed") {
        const { response } = event;
        const tokens = response.usage.completion_tokens;
        state.textContent = `${count(tokens)} tokens, ended by ${response.finish_reason}`;
        report.replaceChildren(...reportOf(response, seen));
        return response;
      }
    }
    throw new Error("the stream ended without its report");
  } catch (error) {
    state.textContent = error.name === "AbortError" ? "stopped" : "failed";
    throw error;
  } finally {
    text.classList.remove("busy");
    text.setAttribute("aria-busy", "false");
    if (running === controller) {
      running = null;
      byId("stop").hidden = true;
      byId("ask").disabled = false;
    }
  }
}

function reportOf(response, seen) {
  const { usage, chunkcache: told } = response;
  const details = usage.prompt_tokens_details;
  const numbers = {
    exact: details.exact_prefix_tokens,
    fused: details.fused_tokens,
    recomputed: details.recomputed_tokens,
    computed: details.computed_tokens,
  };
  const { verify } = told;
  return [
    facts([
      ["First token", milliseconds(told.timings.ttft_ms)],
      ["Seen here after", seen === null ? null : milliseconds(seen)],
      ["Policy", told.policy],
      ["Prompt tokens", count(usage.prompt_tokens)],
      ["Reused", percent(usage.prompt_tokens ? details.cached_tokens / usage.prompt_tokens : null)],
    ]),
    stack(numbers),
    legend(numbers),
    ...(verify ? [closeness(verify, told.timings.ttft_ms)] : []),
    ...warnings(told.warnings),
    documentsTable(told.documents),
    el(
      "details",
      { open: true },
      el("summary", { text: "The prompt, by what became of each token" }),
      promptView(told.prompt),
    ),
  ];
}

function stack(numbers) {
  const bar = el("div", { class: "stack", "aria-hidden": "true" });
  for (const [use, n] of Object.entries(numbers)) {
    const part = el("span", { class: use });
    part.style.flexGrow = String(n);
    bar.append(part);
  }
  return bar;
}

function legend(numbers) {
  const items = Object.entries(numbers).map(([use, n]) =>
    el("li", {}, el("i", { class: use, "aria-hidden": "true" }), `${USES[use]} ${count(n)}`));
  return el("ul", { class: "legend", "aria-label": "Prompt tokens" }, ...items);
}

function closeness(verify, ttft) {
  return el(
    "div",
    {},
    el("h3", { text: "Beside the full prefill" }),
    facts([
      ["Its first token", milliseconds(verify.full_ttft_ms)],
      ["Sooner by", `${(verify.full_ttft_ms / ttft).toFixed(1)} times`],
      ["KL, mean", `${verify.mean_kl.toFixed(4)} nats`],
      ["Same leading tokens", percent(verify.agreement)],
    ]),
    el("p", { class: "soft", text: "Its answer:" }),
    el("p", { class: "answer-text", text: verify.full_answer }),
  );
}

function warnings(found) {
  if (!found.length) return [];
  const items = found.map(({ code, message, document_id: id }) =>
    el("li", { text: `${id === null ? "" : `${id}: `}${message} (${code})` }));
  return [el("h3", { text: "Fallbacks" }), el("ul", { class: "warnings" }, ...items)];
}

function documentsTable(found) {
  if (!found.length) return el("p", { class: "soft", text: "No documents were in the prompt." });
  const head = el(
    "tr", {},
    el("th", { scope: "col", text: "Document" }),
    el("th", { scope: "col", text: "From" }),
    el("th", { scope: "col", class: "num", text: "Tokens" }),
    el("th", { scope: "col", class: "num", text: "Recomputed" }),
  );
  const rows = found.map((d) => el(
    "tr", {},
    el("td", { class: "id", text: d.id }),
    el("td", { text: d.source.replace("_", " ") }),
    el("td", { class: "num", text: count(d.tokens) }),
    el("td", { class: "num", text: count(d.recomputed_tokens) }),
  ));
  return el("table", {}, el("caption", { class: "unseen", text: "Documents in the prompt" }),
    el("thead", {}, head), el("tbody", {}, ...rows));
}

const NAMES = { template: "Template", history: "Earlier in the conversation", query: "Question" };

function promptView(pieces) {
  const view = el("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": "The prompt" });
  let title = null;
  for (const piece of pieces) {
    const name = piece.kind === "chunk" ? piece.document_id : NAMES[piece.kind];
    if (!piece.text) continue;
    if (name !== title) view.append(el("h4", { text: name }));
    title = name;
    const tip = `${USES[piece.use]}, ${count(piece.tokens)} tokens`;
    view.append(el("span", { class: piece.use, title: tip, text: piece.text }));
  }
  return view;
}
