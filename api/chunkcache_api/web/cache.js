/** The view *Cache*: hits, bytes by tier, tokens that were not run, and how close answers are. */

import { call } from "./api.js";
import { byId, bytes, count, el, facts, milliseconds, percent } from "./dom.js";

const TIERS = { host: "RAM", disk: "Disk", device: "Device", remote: "Remote" };

export function startCache(guarded) {
  byId("cache-refresh").addEventListener("click", guarded(load));
  return { open: load };
}

async function load() {
  byId("cache-cards").replaceChildren();
  const stats = await call("GET", "v1/cache/stats");
  byId("cache-cards").append(hits(stats), tiers(stats), saved(stats), fidelity(stats), ends(stats));
  byId("cache-status").textContent = `as of ${new Date().toLocaleTimeString()}; counts since the start`;
}

const card = (title, ...children) => el("section", { class: "card" }, el("h2", { text: title }), ...children);
const big = (text) => el("p", { class: "big", text });
const soft = (text) => el("p", { class: "soft", text });
const listed = (counts) => Object.entries(counts).map(([name, n]) => [name.replaceAll("_", " "), count(n)]);

function hits(stats) {
  return card(
    "Hit rate",
    big(percent(stats.hit_ratio)),
    soft(`of ${count(stats.lookups)} look-ups of chunks`),
    facts([...listed(stats.hits).map(([tier, n]) => [`from ${tier}`, n]), ["prefilled", count(stats.prefills)]]),
    ...(Object.keys(stats.misses).length ? [el("h3", { text: "Misses" }), facts(listed(stats.misses))] : []),
  );
}

function tiers(stats) {
  const parts = Object.entries(stats.tiers).map(([name, tier]) => {
    const used = `${bytes(tier.bytes)}${tier.max_bytes ? ` of ${bytes(tier.max_bytes)}` : ""}`;
    const id = `tier-${name}`;
    return el(
      "div", {},
      el("h3", { id, text: TIERS[name] ?? name }),
      el("meter", { min: 0, max: tier.max_bytes || 1, value: tier.max_bytes ? tier.bytes : 0, "aria-labelledby": id }),
      soft(`${used}, ${count(tier.entries)} chunks`),
    );
  });
  return card("Bytes by tier", ...parts,
    soft(`${bytes(stats.pinned_bytes)} pinned, ${count(stats.evictions)} evictions`));
}

function saved(stats) {
  return card(
    "Tokens saved",
    big(count(stats.saved_tokens)),
    soft(`${percent(stats.saved_ratio)} of ${count(stats.prompt_tokens)} prompt tokens were not run`),
    facts([
      ["exact", count(stats.exact_prefix_tokens)],
      ["reused as placed", count(stats.fused_tokens)],
      ["recomputed", count(stats.prompt_tokens_by_source.recomputed ?? 0)],
      ["computed", count(stats.prompt_tokens_by_source.computed ?? 0)],
      ["first token, mean", stats.mean_ttft_ms === null ? null : milliseconds(stats.mean_ttft_ms)],
    ]),
  );
}

function fidelity(stats) {
  const { fidelity: measured, verification } = stats;
  const known = measured === null
    ? [soft("Not measured with these settings. Run: chunkcache doctor")]
    : [
      big(measured.closeness),
      soft(`to the full prefill, on ${count(measured.num_questions)} built-in questions`),
      facts([
        ["KL, mean", `${measured.mean_kl.toFixed(4)} nats`],
        ["KL, worst", `${measured.worst_kl.toFixed(4)} nats`],
        ["same leading tokens", percent(measured.agreement)],
        ["rows run", percent(measured.charged_ratio)],
      ]),
    ];
  const inService = verification.verified
    ? facts([
      ["verified", count(verification.verified)],
      ["KL, mean", `${verification.mean_kl.toFixed(4)} nats`],
      ["same leading tokens", percent(verification.mean_agreement)],
    ])
    : soft("No answer was verified in service (setting verify_rate).");
  return card("Fidelity", ...known, el("h3", { text: "In service" }), inService);
}

function ends(stats) {
  const requests = Object.keys(stats.requests).length ? facts(listed(stats.requests)) : soft("none yet");
  const fallbacks = Object.keys(stats.fallbacks).length ? facts(listed(stats.fallbacks)) : soft("none");
  return card("Requests", requests, el("h3", { text: "Fallbacks" }), fallbacks);
}
