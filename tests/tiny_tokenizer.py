"""A byte-level BPE tokenizer of 512 tokens, trained here on a few sentences, with a chat template.

It speaks the ChatML form with tools and tool calls in the Hermes form, so that mlx-lm picks the
same detokenizer and tool parser as for the models people run. ``reasoning=True`` adds the
single-token thinking marks.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
PAD, EOS, START = 0, 1, 2
"""Ids of ``<|pad|>``, ``<|im_end|>`` (ends a turn) and ``<|im_start|>``."""

_SPECIAL = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
_MARKS = ["<tool_call>", "</tool_call>"]
_THOUGHTS = ["<think>", "</think>"]

_CORPUS = (
    "The runner takes the baton, and the other runner carries it to the line.",
    "A cache that is wrong does not fail: it answers fluently, and it answers wrongly.",
    "What is the weather in Paris? It is sunny, with a little wind from the west.",
    "def add(left, right):\n    return left + right\n\nfor number in range(10):\n    print(number)",
    "The user asks, the assistant answers; the system says how. Numbers: 0 1 2 3 4 5 6 7 8 9.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    "One machine reads long prompts quickly; another machine writes long replies quickly.",
    "Nothing is skipped that was not proven, and every refusal says why it was refused.",
    "Between two turns of a conversation most of what was said before stays where it was.",
    "Please summarise this document: it describes a garden, a river, and seven small bridges.",
)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- 'Call one with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- no_thoughts }}{%- endif %}
{%- endif %}
"""


def save_tokenizer(path: Path, *, reasoning: bool = False) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    marks = _MARKS + (_THOUGHTS if reasoning else [])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        min_frequency=1,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # Marks are ordinary added tokens: they must survive decoding, since parsers look for them.
    tokenizer.add_tokens(marks)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[PAD],
        "eos_token": _SPECIAL[EOS],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    no_thoughts = "'<think>\\n\\n</think>\\n\\n'" if reasoning else "''"
    template = CHAT_TEMPLATE.replace("no_thoughts", no_thoughts)
    (path / "chat_template.jinja").write_text(template)


THINKING_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set said = message.content %}
{%- if '</think>' in said and not loop.last %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
"""Opens the assistant's thoughts, and drops those of every turn but the last."""


def think(path: Path) -> None:
    """Give the checkpoint in ``path``, made with ``reasoning``, that template."""
    (path / "chat_template.jinja").write_text(THINKING_TEMPLATE)
