/** The view *Documents*: what is stored, in which tier; storing and deleting. */

import { ApiError, call } from "./api.js";
import { byId, bytes, count, el, when } from "./dom.js";

const PAGE = 25;
const TIERS = { host: "RAM", disk: "disk", device: "device", remote: "remote", none: "not cached" };

/** Where the shown page begins, behind which ids the pages before it did. */
let cursors = [null];
let nextCursor = null;
let run;

export function startDocuments(guarded) {
  run = guarded;
  byId("upload-form").addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(upload)();
  });
  byId("page-next").addEventListener("click", guarded(async () => {
    cursors.push(nextCursor);
    await list();
  }));
  byId("page-back").addEventListener("click", guarded(async () => {
    cursors.pop();
    await list();
  }));
  return { open: list };
}

const path = (id) => `v1/documents/${encodeURIComponent(id)}`;

async function list() {
  const cursor = cursors.at(-1);
  const after = cursor === null ? "" : `&after=${encodeURIComponent(cursor)}`;
  const page = await call("GET", `v1/documents?include=tiers&limit=${PAGE}${after}`);
  if (!page.data.length && cursors.length > 1) {
    cursors.pop();
    await list();
    return;
  }
  byId("documents-table").querySelector("tbody").replaceChildren(...page.data.map(row));
  byId("documents-table").hidden = !page.data.length;
  nextCursor = page.next_after;
  byId("page-next").disabled = !page.has_more;
  byId("page-back").disabled = cursors.length === 1;
  byId("documents-status").textContent = page.data.length
    ? `page ${cursors.length}, ${count(page.data.length)} documents`
    : "nothing is stored yet";
}

function row(document) {
  const { id } = document;
  const tiers = Object.entries(document.tiers).map(([tier, n]) =>
    el("span", { class: "tag", text: `${TIERS[tier]} ${count(n)}` }));
  return el(
    "tr", {},
    el("td", { class: "id", text: id }),
    el("td", { "data-label": "Cached in" }, ...tiers),
    el("td", { class: "num", "data-label": "Tokens", text: count(document.num_tokens) }),
    el("td", { class: "num", "data-label": "Chunks", text: count(document.num_chunks) }),
    el("td", { class: "num", "data-label": "Version", text: document.version }),
    el("td", { "data-label": "Changed", text: when(document.updated_at) }),
    el(
      "td", { class: "actions" },
      el("button", { type: "button", class: "quiet", "aria-label": `Show ${id}`, text: "Show",
        onclick: run(() => show(id)) }),
      el("button", { type: "button", class: "quiet", "aria-label": `Delete ${id}`, text: "Delete",
        onclick: run(() => remove(id)) }),
    ),
  );
}

async function show(id) {
  const document = await call("GET", path(id));
  byId("viewer-title").textContent = id;
  byId("viewer-text").textContent = document.text;
  byId("viewer").showModal();
}

async function remove(id) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = `Delete ${id} from every tier?`;
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  if (dialog.returnValue !== "yes") return;
  await call("DELETE", path(id));
  byId("documents-status").textContent = `${id} is deleted`;
  await list();
  byId("documents-status").focus();
}

async function upload() {
  const items = await given();
  const status = byId("upload-status");
  for (const [index, { id, text, format }] of items.entries()) {
    status.textContent = `storing ${id} (${index + 1} of ${items.length}) …`;
    if ([".", ".."].includes(id)) {
      throw new ApiError(400, "invalid_value", "browsers cannot address a document named by dots");
    }
    await call("PUT", path(id), { body: { text, format } });
  }
  const size = items.reduce((sum, item) => sum + item.text.length, 0);
  status.textContent = `${count(items.length)} stored (${bytes(size)})`;
  byId("upload-form").reset();
  await list();
}

/** What is to be stored: the files, or what was typed. */
async function given() {
  const files = [...byId("files").files];
  const items = await Promise.all(files.map(async (file) => ({
    id: file.name,
    text: textOf(await file.arrayBuffer(), file.name),
    format: /\.(md|markdown)$/i.test(file.name) ? "markdown" : "text",
  })));
  const [id, text] = [byId("document-id").value.trim(), byId("document-text").value];
  if (id && text) items.push({ id, text, format: "text" });
  else if (id || text) throw new ApiError(400, "invalid_value", "give both an id and a text");
  if (!items.length) throw new ApiError(400, "invalid_value", "choose files, or give an id and a text");
  return items;
}

function textOf(buffer, name) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(buffer);
  } catch {
    throw new ApiError(
      400, "invalid_value", `${name} is not UTF-8 text; 'chunkcache precache' reads other files`,
    );
  }
}
