"""Renders conversations with a model's chat template, and finds what the assistant says in the text.

A template that marks answers ({% generation %}) says so itself. Of any other, an answer is what a
conversation up to it has more than the prompt for it (`add_generation_prompt`), up to the token that ends the
turn.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from optimus.data.chat_format import ChatSample
from optimus.data.jsonl_file import SkippedSample, SkipReason

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
MAX_RENDERED = 1 << 26  # characters of all prefixes of a conversation
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
UNCLEAR = "its answers cannot be told from its prompts; mark them with {% generation %}"

Span = tuple[int, int]  # characters of the rendered text


class ChatTemplate:
    """The chat template of a processor."""

    def __init__(self, processor: Any) -> None:
        self._template: str = processor.chat_template
        self._variables: dict[str, Any] = dict(processor.tokenizer.special_tokens_map)
        self._special = tuple(processor.tokenizer.all_special_tokens)
        self._is_marked = MARKED.search(self._template) is not None

    def render(self, sample: ChatSample) -> tuple[str, list[Span]]:
        """Returns the text of a conversation and the spans of its answers; raises SkippedSample."""
        try:
            text, spans = self._render(sample.messages, marked=self._is_marked)
            text.encode()
            if not self._is_marked:
                spans = self._compare_prefixes(sample.messages, text)
        except UnicodeEncodeError:  # a lone surrogate
            raise SkippedSample(SkipReason.BAD_TEXT, "a lone surrogate") from None
        except TEMPLATE_ERRORS as error:
            raise SkippedSample(SkipReason.TEMPLATE, f"{type(error).__name__}: {error}") from None
        return text, spans

    def _render(
        self, messages: tuple[dict[str, Any], ...], *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self._template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marked,
            **self._variables,
        )
        return str(texts[0]), list(map(tuple, spans[0])) if marked else []

    def _compare_prefixes(self, messages: tuple[dict[str, Any], ...], text: str) -> list[Span]:
        """Returns the answers of a template that does not mark them."""
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if 3 * len(answers) * len(text) > MAX_RENDERED:
            detail = f"{len(answers):,} answers in a text of {len(text):,} characters"
            raise SkippedSample(SkipReason.TEMPLATE, detail)
        spans = []
        for place in answers:
            before = self._render(messages[:place])[0] if place else ""
            prompt = self._render(messages[:place], prompt=True)[0] if place else ""
            until = text if place + 1 == len(messages) else self._render(messages[: place + 1])[0]
            if not (until.startswith(prompt) and text.startswith(until)):
                raise SkippedSample(SkipReason.TEMPLATE, UNCLEAR)
            answer = until[len(prompt) :]
            if prompt == before and not _begins_with_content(answer, messages[place]):
                raise SkippedSample(SkipReason.TEMPLATE, UNCLEAR)
            stripped = answer.rstrip()
            if stripped.endswith(self._special):  # whitespace behind the end of a turn is no answer
                answer = stripped
            spans.append((len(prompt), len(prompt) + len(answer)))
        return spans


def _begins_with_content(answer: str, message: dict[str, Any]) -> bool:
    """Tells whether a template that has no prompt for answers puts nothing before them either."""
    texts = [part["text"] for part in message["content"] if part["type"] == "text"]
    return answer.lstrip().startswith(texts[0].strip()) if texts else True
