"""`TokenizerFiles`: what the files next to a tokenizer.json say, each read and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphllm.config.fields import Fields, read, read_json, read_text, section
from graphllm.config.parameter import Check, is_int

_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
_TOKEN = Check(
    lambda value: isinstance(value.get("content") if isinstance(value, dict) else value, str),
    "set it to the checkpoint's token, a text or an object with content",
)
_TOKEN_IDS = Check(
    lambda value: is_int(value) or (isinstance(value, list) and all(is_int(i) for i in value)),
    "set it to the checkpoint's token id, or a list of them",
)
_TEMPLATES = Check(
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, list) and all(_is_template(t) for t in value))
        or (isinstance(value, dict) and all(isinstance(t, str) for t in value.values()))
    ),
    "set it to the checkpoint's template, a text, or a list of objects with name and template",
)
_SPECIAL_FILES = "tokenizer_config.json or special_tokens_map.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    config: tokenizer_config.json, empty where there is none.
    special: the named special tokens ("bos_token" ...), which chat templates may use, too.
    templates: chat templates by name. Files of their own come before the templates in tokenizer_config.json.
    """

    config: Fields
    special: Mapping[str, str]
    templates: Mapping[str, str]

    @staticmethod
    def read(folder: Path) -> TokenizerFiles:
        """Read a folder. Raises ConfigError naming the file and the field that are wrong."""
        config = read_json(folder / "tokenizer_config.json") or {}
        named = dict(config)
        if "added_tokens_decoder" not in config:  # then the file is from the time of this one, and it decides
            named.update(read_json(folder / "special_tokens_map.json") or {})
        for name in _SPECIAL:
            read(named, name, _TOKEN, "", "", _SPECIAL_FILES)
        tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if k.endswith("_token")}
        special = {k: v for k, v in tokens.items() if isinstance(v, str)}
        files = {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        if files:
            return TokenizerFiles(config, special, {name: read_text(file) for name, file in files.items()})
        inline = read(config, "chat_template", _TEMPLATES, {}, {}, "tokenizer_config.json")
        if isinstance(inline, str):
            inline = {"default": inline} if inline else {}
        elif isinstance(inline, list):
            inline = {t["name"]: t["template"] for t in inline}
        return TokenizerFiles(config, special, dict(inline))


def special_ids(model: Fields, generation: Fields) -> dict[str, list[int]]:
    """The numbers of special tokens, by "eos_token" and so on: of generation_config.json, then of config.json, then of
    its text model. Raises ConfigError for a field that is neither a number nor a list of numbers."""
    return {
        **_ids(section(model, "text_config"), "config.json"),
        **_ids(model, "config.json"),
        **_ids(generation, "generation_config.json"),
    }


def _ids(config: Fields, file: str) -> dict[str, list[int]]:
    """Of a file that gives one id or a list of them. Some files say -1 for none."""
    given = {
        name: read(config, f"{name}_id", _TOKEN_IDS, (), (), file) for name in ("bos_token", "eos_token", "pad_token")
    }
    found = {name: [i for i in ([v] if isinstance(v, int) else v) if i >= 0] for name, v in given.items()}
    return {name: ids for name, ids in found.items() if ids}


def _is_template(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("template"), str)
