"""POST /v1/decisions: answers to questions about one input, as probabilities of their options. A
question is a request of one token. Knows no stage.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import UnsupportedValue
from fleet.core.ids import REQUEST, RequestId, new_request_id
from fleet.processing import Message, TextPart
from web.gateway.answer import TextPiece
from web.gateway.decision_labels import OptionLabel, OptionLabels, probabilities
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import PreparedChat
from web.http.body import body_memory_of, read_body
from web.http.disconnect import until_disconnect
from web.http.json_response import json_response
from web.http.middleware import request_id_of
from web.http.offload import parse_body
from web.openai.responses.conversation import placed_items
from web.schema.chat import AnswerOptions
from web.schema.decision_body import AnyQuestion, DecisionBody, parse_decision
from web.schema.decision_object import (
    ChoiceAnswer,
    ChoiceProbability,
    DecisionAnswer,
    DecisionObject,
    PredicateAnswer,
    ScoreAnswer,
    ScoreProbability,
)
from web.schema.response_items import messages_of
from web.schema.response_object import InputTokensDetails, OutputTokensDetails, ResponseUsage
from web.schema.responses import Usage

MAX_AT_ONCE = 8
"""Questions of one body that are asked at the same time; the others wait, so that they do not take
all places of the fleet.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedQuestion:
    """A question and the labels of its options. `where`: name of the question's field in the body,
    for errors.
    """

    question: AnyQuestion
    labels: Sequence[OptionLabel]
    where: str

    @property
    def message(self) -> Message:
        """The question as the last message of its prompt."""
        text, question = self.question.text, self.question
        if question.type == "predicate":
            yes, no = (label.text for label in self.labels)
            asked = f"Is this statement about the input true?\n{text}"
            asked += f"\n\nAnswer {yes} if it is true, otherwise {no}. Write nothing else."
        else:
            listed = "\n".join(self._options())
            end = "Answer with the letters before the best option. Write nothing else."
            asked = f"About the input: {text}\n\nOptions:\n{listed}\n\n{end}"
        return Message(role="user", content=TextPart(text=asked, where=self.where))

    def _options(self) -> list[str]:
        question = self.question
        if question.type == "choice":
            named = [(_shown(each.value), each.description) for each in question.choices]
        elif question.type == "score":
            named = [(each.label, each.description) for each in question.levels]
        else:
            named = []
        return [
            f"{label.text}: {name}" + (f" ({description})" if description else "")
            for label, (name, description) in zip(self.labels, named, strict=True)
        ]

    def answer(self, shares: Sequence[float]) -> DecisionAnswer:
        """Return the answer in OpenAI's shape. `shares`: probability of each option, in the order
        of `labels`.
        """
        question, name = self.question, self.question.name
        if question.type == "predicate":
            return PredicateAnswer(name=name, probability=shares[0])
        if question.type == "choice":
            best = max(range(len(shares)), key=shares.__getitem__)
            listed = [
                ChoiceProbability(value=each.value, probability=share)
                for each, share in zip(question.choices, shares, strict=True)
            ]
            return ChoiceAnswer(
                name=name,
                choice=question.choices[best].value,
                confidence=shares[best],
                probabilities=listed,
            )
        levels = [
            ScoreProbability(value=value, label=level.label, probability=share)
            for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
        ]
        score = sum(level.value * level.probability for level in levels)
        return ScoreAnswer(name=name, score=score, confidence=max(shares), probabilities=levels)


class DecisionEndpoint:
    """`POST /v1/decisions`. A raw ASGI app, so that a client disconnect cancels all questions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._labels: OptionLabels | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(Request(scope, receive), self._gateway.config.limits.max_body_bytes)
        body = await parse_body(parse_decision, raw)
        del raw
        await until_disconnect(receive, self._answer(body, scope, receive, send))

    async def _answer(self, body: DecisionBody, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, request_id = self._gateway, request_id_of(scope)
        gateway.check_model(body.model)
        self._check_engine()
        gateway.check_num_messages(len(body.items) + 1, "input")
        suffix = request_id.removeprefix(REQUEST)
        items = [one.item(f"{suffix}_{index}") for index, one in enumerate(body.items)]
        placed = placed_items(gateway, [], items, is_text=isinstance(body.input, str))
        evidence = tuple(messages_of(placed))
        asked = [
            self._asked(question, f"questions[{index}]")
            for index, question in enumerate(body.questions)
        ]
        ignored = sorted(given.where for given in body.ignored)
        turn = DecisionTurn(
            gateway=gateway, model=body.model, evidence=evidence, cache_key=body.prompt_cache_key
        )
        del body
        body_memory_of(scope).free()
        decision = await turn.decide(asked, request_id)
        headers = {"x-fleet-ignored": ", ".join(ignored)} if ignored else {}
        await json_response(decision, headers=headers)(scope, receive, send)

    def _check_engine(self) -> None:
        """Check that the engine gives log probabilities of chosen tokens. Raises: UnsupportedValue
        on vLLM, which does not.
        """
        main = self._gateway.graph.main_stage.name
        if self._gateway.config.engine_of(main) == "vllm":
            reason = "this server runs it on vLLM, without log probabilities of chosen tokens"
            raise UnsupportedValue(f"model: {reason}; send a chat instead", param="model")

    def _asked(self, question: AnyQuestion, where: str) -> AskedQuestion:
        """Return a question with its labels. Raises: UnsupportedValue if the tokenizer has too few
        tokens for the labels; BadInput for a control token in the question's texts.
        """
        self._labels = known = self._labels or OptionLabels(self._gateway.frontend)
        if question.type == "predicate":
            labels, num, field = known.yes_and_no, 2, "instructions"
        elif question.type == "choice":
            num, field = len(question.choices), "choices"
            labels = known.letters(num)
        else:
            num, field = len(question.levels), "levels"
            labels = known.letters(num)
        if len(labels) < num:
            reason = f"this model's tokenizer has tokens for {len(labels)} options; send fewer"
            raise UnsupportedValue(f"{where}.{field}: {reason}", param=f"{where}.{field}")
        asked = AskedQuestion(question=question, labels=labels, where=where)
        content = asked.message.content
        assert isinstance(content, TextPart)
        self._gateway.frontend.check_text(content)
        return asked


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTurn:
    """Input of a decision. `evidence`: messages about which the questions are asked. `cache_key`:
    name of the conversation whose cached prefix is reused; None for none.
    """

    gateway: Gateway
    model: str
    evidence: tuple[Message, ...]
    cache_key: str | None

    async def decide(self, asked: Sequence[AskedQuestion], first: RequestId) -> DecisionObject:
        """Return the answers to all questions. `first`: id of the first question's request.

        Raises: the errors of `Gateway.prepare_chat` and `Gateway.submit_prepared`; FleetError if an
        answer fails. All other questions are aborted then.
        """
        places = asyncio.Semaphore(MAX_AT_ONCE)
        ids = [first, *(new_request_id() for _ in asked[1:])]
        tasks = [
            asyncio.create_task(self._ask(one, id, places))
            for one, id in zip(asked, ids, strict=True)
        ]
        try:
            made = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        answers, usages = [answer for answer, _ in made], [usage for _, usage in made]
        return DecisionObject(model=self.gateway.model, answers=answers, usage=_summed(usages))

    async def _ask(
        self, asked: AskedQuestion, request_id: RequestId, places: asyncio.Semaphore
    ) -> tuple[DecisionAnswer, Usage]:
        async with places:
            active = await self.gateway.submit_prepared(await self._prepare(asked, request_id))
            async with active.answer as answer:
                told = {
                    token: logprob
                    async for piece in answer.pieces()
                    if isinstance(piece, TextPiece)
                    for one in piece.logprobs
                    for token, logprob in one.top
                }
            return asked.answer(probabilities(asked.labels, told)), answer.usage()

    async def _prepare(self, asked: AskedQuestion, request_id: RequestId) -> PreparedChat:
        ids = tuple(token for label in asked.labels for token in label.ids)
        options = AnswerOptions(
            model=self.model,
            temperature=0.0,
            max_tokens=1,
            min_tokens=0,
            ignore_eos=False,
            allowed_token_ids=list(ids),
            store=False,
            prompt_cache_key=self.cache_key,
        )
        messages = (*self.evidence, asked.message)
        chat = await self.gateway.prepare_chat(options, messages, request_id, where="input")
        main = self.gateway.graph.main_stage.name
        own = msgspec.structs.replace(chat.spec.sampling[main], top_logprobs=0, logprob_ids=ids)
        sampling = {**chat.spec.sampling, main: own}
        return replace(chat, spec=msgspec.structs.replace(chat.spec, sampling=sampling))


def _summed(usages: Sequence[Usage]) -> ResponseUsage:
    """Return the token counts of all questions. The input is in the prompt of each question and
    counts once per question.
    """
    prompts = [usage.prompt_tokens_details for usage in usages]
    return ResponseUsage(
        input_tokens=sum(usage.prompt_tokens for usage in usages),
        input_tokens_details=InputTokensDetails(
            cached_tokens=sum(prompt.cached_tokens for prompt in prompts),
            audio_tokens=0,
            text_tokens=sum(prompt.text_tokens for prompt in prompts),
        ),
        output_tokens=sum(usage.completion_tokens for usage in usages),
        output_tokens_details=OutputTokensDetails(),
        total_tokens=sum(usage.total_tokens for usage in usages),
    )
