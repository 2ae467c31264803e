"""What ``deploy/`` says: that it parses, keeps to safe defaults, and names only what there is."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chunkcache.chunk_cache import ChunkCache
from chunkcache.settings import Settings
from chunkcache_api.app import create_app
from chunkcache_api.auth.access import ROUTE_SCOPES
from chunkcache_api.cli.serve import DRAIN_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KEYS = {"keys": {"existingSecret": "our-keys"}}
METRIC = re.compile(r"\bchunkcache_[a-z_]+\b")

RenderChart = Callable[..., list[dict[str, Any]]]


def files() -> list[Path]:
    return [p for p in DEPLOY.rglob("*") if p.is_file() and not p.is_symlink()]


def load(path: str) -> Any:
    text = (DEPLOY / path).read_text(encoding="utf-8")
    return json.loads(text) if path.endswith(".json") else yaml.safe_load(text)


@pytest.fixture
def metric_names(open_cache: Callable[..., ChunkCache]) -> set[str]:
    """Every name that ``/metrics`` exposes."""
    runtime = open_cache().runtime
    app = create_app(runtime)
    app.state.service.open()
    text = generate_latest(app.state.metrics).decode()
    names = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, [""])}
    return names


def expressions(path: str) -> list[str]:
    loaded = load(path)
    if path.endswith(".json"):
        return [t["expr"] for panel in loaded["panels"] for t in panel.get("targets", ())]
    return [rule["expr"] for group in loaded["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("path", ["grafana/chunkcache.json", "prometheus/alerts.yaml"])
def test_every_metric_that_is_named_is_exposed(path: str, metric_names: set[str]) -> None:
    found = expressions(path)
    assert len(found) > 10
    named = {name for expression in found for name in METRIC.findall(expression)}
    assert named - metric_names == set()
    for expression in found:
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")


def test_the_dashboard_shows_what_there_is(metric_names: set[str]) -> None:
    named = {n for e in expressions("grafana/chunkcache.json") for n in METRIC.findall(e)}
    bases = {re.sub(r"_(bucket|sum|count)$", "", n) for n in metric_names}
    shown = {re.sub(r"_(bucket|sum|count)$", "", n) for n in named}
    left_out = {b for b in bases - shown if b.startswith("chunkcache_")}
    assert left_out == {
        "chunkcache_build_info",
        "chunkcache_answer_tokens_total",
        "chunkcache_stored_entries_total",
        "chunkcache_open_leases",
        "chunkcache_verify_sampled_total",
        "chunkcache_verify_verified_total",
        "chunkcache_verify_dropped_total",
        "chunkcache_verify_failed_total",
    }


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    panels = load("grafana/chunkcache.json")["panels"]
    cells = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({p["id"] for p in panels}) == len(panels)
    assert all(p["description"] for p in panels if p["type"] != "row")


def test_alerts_say_how_bad_it_is_and_what_to_do() -> None:
    rules = [rule for group in load("prometheus/alerts.yaml")["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize("path", files(), ids=lambda p: p.name)
def test_no_host_is_named_but_this_one(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    allowed = {"http://127.0.0.1:8000/readyz", "http://json-schema.org/draft-07/schema"}
    assert set(re.findall(r"https?://[^\s'\"#,)]+", text)) <= allowed
    assert not re.search(r"[a-z0-9-]+\.(?:io|com|org|dev)/[a-z]", _without_kinds(text))


def _without_kinds(text: str) -> str:
    """Kinds and labels of Kubernetes look like hosts."""
    text = re.sub(r"(apiVersion: |^)[\w.]+/v\d", "", text, flags=re.MULTILINE)
    return re.sub(r"app\.kubernetes\.io/\w+|https?://\S+|nvidia\.com/gpu", "", text)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_images_run_without_rights_and_ask_for_keys(kind: str) -> None:
    lines = (DEPLOY / "docker" / f"Dockerfile.{kind}").read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]
    last = {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}
    assert json.loads(last["ENTRYPOINT"]) == ["chunkcache"]
    # Off loopback, serve refuses to start without keys; see test_serve.py.
    assert json.loads(last["CMD"]) == ["serve", "--host", "0.0.0.0"]
    text = "\n".join(lines)
    for name in re.findall(r"CHUNKCACHE_([A-Z_]+)=", text):
        assert name.lower() in Settings.model_fields
    copied = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    packages = ("chunkcache", "kernels", "retriever", "api", "eval")
    assert all(f"!{name}\n" in copied for name in (*packages, "pyproject.toml", "constraints.txt"))


def test_compose_keeps_the_service_to_this_machine() -> None:
    service = load("compose.yaml")["services"]["chunkcache"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
    for name in service["environment"]:
        assert name.removeprefix("CHUNKCACHE_").lower() in Settings.model_fields
    dockerfile = service["build"]["dockerfile"]
    for kind in ("cpu", "cuda"):
        assert (ROOT / re.sub(r"\$\{[^}]+\}", kind, dockerfile)).is_file()
    rules = load("prometheus/prometheus.yaml")["rule_files"]
    assert rules == ["alerts.yaml"]
    mounted = [v.split(":")[0] for v in load("compose.yaml")["services"]["prometheus"]["volumes"]]
    assert all((DEPLOY / path).is_file() for path in mounted if path.startswith("./"))


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "chunkcache.service").read_text(encoding="utf-8")
    command = re.findall(r"^ExecStart=(\S+) (.*)$", text, re.MULTILINE)
    assert command == [("/opt/chunkcache/bin/chunkcache", "serve --host 127.0.0.1 --port 8000")]
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > DRAIN_SECONDS
    for name in re.findall(r"^Environment=CHUNKCACHE_([A-Z_]+)=", text, re.MULTILINE):
        assert name.lower() in Settings.model_fields
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("the rest needs systemd-analyze, which is not there")
    unit = tmp_path / "chunkcache.service"
    unit.write_text(text.replace(command[0][0], "/bin/true"))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if "chunkcache.service" in line]
    assert told == []


def test_the_chart_wants_keys(render_chart: RenderChart) -> None:
    with pytest.raises(Exception, match=r"keys\.existingSecret"):
        render_chart()


def test_the_chart_is_one_process_with_few_rights_and_probes(render_chart: RenderChart) -> None:
    by_kind = {found["kind"]: found for found in render_chart(**KEYS)}
    assert set(by_kind) == {"StatefulSet", "Service"}
    spec = by_kind["StatefulSet"]["spec"]
    assert spec["replicas"] == 1
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "its variables would be taken for settings"
    assert pod["terminationGracePeriodSeconds"] > DRAIN_SECONDS
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["args"] == [
        *("serve", "--host", "0.0.0.0", "--port", "8000", "--keys-file", "/keys/keys.json")
    ]
    assert container["env"] == [
        {"name": "CHUNKCACHE_MODEL", "value": "demo"},
        {"name": "CHUNKCACHE_VERIFY_RATE", "value": "0.01"},
    ]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ("GET", container[probe]["httpGet"]["path"]) in ROUTE_SCOPES
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez", "loading is no reason to die"
    mounts = {m["name"] for m in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} | claims
    assert pod["volumes"][0]["secret"] == {"secretName": "our-keys", "defaultMode": 0o440}
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == by_kind["Service"]["spec"]["selector"]


def test_what_the_charts_values_turn_on(render_chart: RenderChart) -> None:
    found = render_chart(
        **KEYS,
        settings={"model": "/data/model", "read_only": True},
        monitoring={"enabled": True, "metricsKeySecret": "admin"},
        networkPolicy={"enabled": True, "allowFrom": {"app": "rag"}},
        persistence={"storageClass": "fast"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
    )
    by_kind = {each["kind"]: each for each in found}
    pod = by_kind["StatefulSet"]["spec"]["template"]["spec"]
    assert {"name": "CHUNKCACHE_READ_ONLY", "value": "true"} in pod["containers"][0]["env"]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    (claim,) = by_kind["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    (endpoint,) = by_kind["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "admin", "key": "key"}
    assert by_kind["PrometheusRule"]["spec"] == load("prometheus/alerts.yaml")
    dashboard = json.loads(by_kind["ConfigMap"]["data"]["chunkcache.json"])
    assert dashboard == load("grafana/chunkcache.json")
    (rule,) = by_kind["NetworkPolicy"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "rag"}}}]


def test_the_charts_own_values_fit_its_schema() -> None:
    values, schema = load("helm/chunkcache/values.yaml"), load("helm/chunkcache/values.schema.json")
    assert all(re.fullmatch(r"[a-z][a-z_]*", name) for name in values["settings"])
    assert set(values["settings"]) <= set(Settings.model_fields)
    assert set(schema["properties"]) <= set(values)
    grace = schema["properties"]["terminationGracePeriodSeconds"]["minimum"]
    assert values["terminationGracePeriodSeconds"] >= grace > DRAIN_SECONDS
