"""``chunkcache ask``: the answer on stdout, the account on stderr."""

from pathlib import Path

import pytest

from chunkcache_retriever.testing import FixedEmbedder

QUESTION = "What is the code of the door?"
SHORT = ("--max-tokens", "8")


@pytest.fixture
def documents(cli, passages: dict[str, str], tmp_path: Path) -> list[str]:
    """Pre-cached documents; gives their options."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in passages.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    assert cli("precache", folder).exit_code == 0
    return [arg for name in passages for arg in ("--doc", f"{name}.txt")]


def test_the_answer_alone_is_on_stdout(cli, cli_json, documents: list[str]) -> None:
    result = cli("ask", QUESTION, *documents, *SHORT)
    assert result.exit_code == 0
    body = cli_json("ask", QUESTION, *documents, *SHORT)
    assert result.stdout == body["answer"] + "\n"
    for shown in ("exact prefix", "fused", "recomputed", "from disk", "load", "probe", "tower.txt"):
        assert shown in result.stderr
    assert "charged ratio" in result.stderr
    assert "model loaded in" in result.stderr
    assert "after the process started" in result.stderr


def test_json_is_the_answer_of_the_api_and_the_process_s_times(
    cli_json, documents: list[str]
) -> None:
    body = cli_json("ask", QUESTION, *documents, *SHORT)
    assert body["object"] == "chunkcache.answer"
    usage = body["usage"]
    details = usage["prompt_tokens_details"]
    parts = ("exact_prefix_tokens", "fused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(details[p] for p in parts) == usage["prompt_tokens"]
    assert details["cached_tokens_by_source"]["disk"] == details["cached_tokens"] > 0
    assert [d["id"] for d in body["chunkcache"]["documents"]] == documents[1::2]
    assert body["chunkcache"]["policy"].startswith("hybrid(0.15")
    assert body["chunkcache"]["verify"] is None
    process = body["process"]
    assert 0 < process["model_load_seconds"] < process["start_to_first_token_seconds"]


def test_compare_puts_the_full_prefill_beside(cli, cli_json, documents: list[str]) -> None:
    result = cli("ask", QUESTION, *documents, *SHORT, "--compare")
    assert result.exit_code == 0
    for shown in ("full prefill", "prompt tokens", "KL divergence", "mean over", "faster"):
        assert shown in result.stderr
    verify = cli_json("ask", QUESTION, *documents, *SHORT, "--compare")["chunkcache"]["verify"]
    assert verify["kl_first"] >= 0
    assert verify["mean_kl"] >= 0
    assert verify["full_answer"]


def test_policy_and_ratio_are_passed_on(cli_json, documents: list[str]) -> None:
    full = cli_json("ask", QUESTION, *documents, *SHORT, "--policy", "full", "--compare")
    assert full["chunkcache"]["exact"] is True
    assert full["chunkcache"]["verify"]["agreement"] == 1.0
    assert full["chunkcache"]["verify"]["agreeing_tokens"] == 8
    assert full["chunkcache"]["verify"]["kl_first"] == 0
    half = cli_json("ask", QUESTION, *documents, *SHORT, "--policy", "deviation", "--ratio", "0.5")
    assert half["chunkcache"]["policy"].startswith("deviation(0.5")
    none = cli_json("ask", QUESTION, *documents, *SHORT, "--policy", "none")
    assert none["usage"]["prompt_tokens_details"]["recomputed_tokens"] == 0


def test_sampling_and_system_prompt_are_passed_on(cli_json, documents: list[str]) -> None:
    def answer(*options: str) -> dict:
        return cli_json("ask", QUESTION, *documents, *SHORT, *options)

    drawn = answer("--temperature", "1.5", "--seed", "3")["answer"]
    assert drawn == answer("--temperature", "1.5", "--seed", "3")["answer"]
    assert drawn != answer("--temperature", "1.5", "--seed", "4")["answer"]
    plain, longer = (
        answer(),
        answer("--system", "Answer in the words of the document alone, please."),
    )
    assert longer["usage"]["prompt_tokens"] != plain["usage"]["prompt_tokens"]


def test_another_preparation_is_prefilled_for_this_question(cli_json, documents: list[str]) -> None:
    body = cli_json("ask", QUESTION, *documents, *SHORT, "--preparation", "alone")
    assert body["chunkcache"]["preparation"] == "alone"
    assert {d["source"] for d in body["chunkcache"]["documents"]} == {"computed"}


def test_fallbacks_are_told(cli, documents: list[str], settings_env: pytest.MonkeyPatch) -> None:
    settings_env.setenv("CHUNKCACHE_MIN_FUSED_CONTEXT_TOKENS", "5000")
    result = cli("ask", QUESTION, *documents, *SHORT)
    assert result.exit_code == 0
    assert "(context_too_short)" in result.stderr


def test_top_k_looks_documents_up(
    cli_json, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkcache_retriever.minilm.MiniLmEmbedder", FixedEmbedder)
    body = cli_json("ask", "When was the bridge over the river built?", "--top-k", "1", *SHORT)
    assert [d["id"] for d in body["chunkcache"]["documents"]] == ["bridge.txt"]


def test_an_unknown_document_is_an_error(cli, cli_json, documents: list[str]) -> None:
    body = cli_json("ask", QUESTION, "--doc", "nowhere.txt", exit_code=1)
    assert body["error"]["code"] == "document_not_found"
    assert "nowhere.txt" in body["error"]["message"]
    result = cli("ask", QUESTION, "--doc", "no\x1b[2Jwhere")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: there is no document")
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--policy", "magic"), "invalid_value"),
        (("--policy", "full", "--ratio", "0.5"), "invalid_value"),
        (("--temperature", "3"), "invalid_value"),
        (("--max-tokens", "0"), "invalid_value"),
        (("--codec", "zip"), "invalid_value"),
    ],
)
def test_a_bad_value_is_an_error(
    cli_json, documents: list[str], options: tuple[str, ...], code: str
) -> None:
    body = cli_json("ask", QUESTION, *documents, *options, exit_code=1)
    assert body["error"]["code"] == code


@pytest.mark.parametrize(
    "args",
    [
        ("ask", QUESTION),
        ("ask", QUESTION, "--doc", "a", "--top-k", "2"),
        ("ask", QUESTION, "--top-k", "0"),
        ("ask", "--doc", "a"),
        ("ask", QUESTION, "--doc", "a", "--nonsense"),
    ],
)
def test_wrong_usage_has_a_code_of_its_own(cli, args: tuple[str, ...]) -> None:
    result = cli(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage" in result.stderr
