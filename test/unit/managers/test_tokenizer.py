"""Loading, the ids that mean something, and each token's bytes against the library's own decoder."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang
from sglang.srt.errors import ConfigError
from sglang.srt.managers.tokenizer import BYTE_OF_CHAR, Tokenizer

TOY = Path(sglang.__file__).parent / "assets" / "toy_tokenizer"
TOKENIZER = Tokenizer.load(TOY)


@pytest.fixture
def copy(tmp_path):
    """A writable copy of the toy tokenizer's directory."""
    shutil.copytree(TOY, tmp_path / "t", copy_function=shutil.copyfile)
    return tmp_path / "t"


def edit(file, **changes):
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | changes))


def test_ids_of_the_toy_tokenizer():
    facts = json.loads((TOY / "tokenizer_facts.json").read_text())
    assert TOKENIZER.vocab_size == facts["vocab_size"]
    assert (TOKENIZER.bos_id, TOKENIZER.pad_id, TOKENIZER.eos_ids) == (0, 2, frozenset({1}))
    assert 4032 in TOKENIZER.special_ids and 4033 not in TOKENIZER.special_ids  # System is special, User is not
    for text, token_id in facts["special"].items():
        assert TOKENIZER.encode(text) == [token_id]
        assert TOKENIZER.token_bytes(token_id) == text.encode()
    assert TOKENIZER.chat_template.startswith("{{ bos_token }}")


def test_the_byte_alphabet_has_256_bytes():
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))


@settings(deadline=None)
@given(st.text())
def test_text_round_trips_and_is_its_tokens_bytes(text):
    ids = TOKENIZER.encode(text)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 4200), max_size=30), st.booleans())
def test_bytes_of_any_ids_decode_as_the_library_decodes_them(ids, skip):
    joined = b"".join(TOKENIZER.visible_bytes(i, skip) for i in ids)
    assert joined.decode("utf-8", "replace") == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_ids_without_a_token_have_no_text():
    assert TOKENIZER.token_bytes(4096) == TOKENIZER.token_bytes(-1) == TOKENIZER.token_bytes(10**9) == b""
    assert TOKENIZER.token_text(4096) == ""


def test_a_part_of_a_character_is_shown_as_replacement():
    ids = TOKENIZER.encode("🙂")
    assert len(ids) > 1 and "�" in TOKENIZER.token_text(ids[0])


def test_eos_is_the_union_of_all_places(copy, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    edit(model / "generation_config.json", eos_token_id=[1, 7])
    edit(model / "config.json", eos_token_id=9, text_config={"eos_token_id": 11})
    assert Tokenizer.load(copy, model).eos_ids == {1, 7, 9, 11}
    assert Tokenizer.load(copy).eos_ids == {1}


def test_a_token_may_be_named_by_an_object(copy):
    edit(copy / "tokenizer_config.json", eos_token={"content": "</think>"}, bos_token=None)
    loaded = Tokenizer.load(copy)
    assert loaded.eos_ids == {4036} and loaded.bos_id is None


def breakages():
    return {
        "missing directory": (lambda d: shutil.rmtree(d), "no tokenizer.json"),
        "missing file": (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json in .*--tokenizer-path"),
        "truncated": (lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text()[:5000]), "not valid JSON"),
        "binary": (lambda d: (d / "tokenizer.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        "a list": (lambda d: (d / "tokenizer.json").write_text("[]"), "JSON object, found list"),
        "no model": (lambda d: edit(d / "tokenizer.json", model={"type": "Nothing"}), "not a usable tokenizer"),
        "other decoder": (lambda d: edit(d / "tokenizer.json", decoder={"type": "WordPiece"}), "decoder WordPiece, but only ByteLevel"),
        "no decoder": (lambda d: edit(d / "tokenizer.json", decoder=None), "decoder None"),
        "no eos": (lambda d: edit(d / "tokenizer_config.json", eos_token=None), "no EOS"),
        "broken config": (lambda d: (d / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not valid JSON"),
        "directory": (lambda d: ((d / "tokenizer.json").unlink(), (d / "tokenizer.json").mkdir()), "cannot read"),
    }


@pytest.mark.parametrize("name", breakages())
def test_what_cannot_be_loaded_is_one_line(copy, name):
    damage, words = breakages()[name]
    damage(copy)
    with pytest.raises(ConfigError, match=words) as caught:
        Tokenizer.load(copy)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
