"""The language model's stage of the graph `cascade`: the stage of the graph `text`, which also
waits for the transcripts of the prompt's clips, and sends the text of its answer to the voice.
"""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from fleet.core.chunk import PROMPT_TOKENS
from fleet.core.errors import ContextLengthExceeded
from fleet.core.ids import DECODE, EdgeName, Walk
from fleet.core.request import RequestSpec, ToolUse
from fleet.engine.base import TOKEN, Arrays, EngineInput, EngineOutput, EngineRequest
from fleet.graphs.cascade import CLIP_ID, SAID, TEXT, TRANSCRIPT
from fleet.processing.detokenize import IncrementalDetokenizer, StopTrimmer
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.parser import CallParser, Said
from fleet.processing.transcripts import Transcripts, insert_transcripts, literal_tokenizer
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput
from fleet.stages.options import BuildOptions
from fleet.stages.text import LanguageModel, TextAdapter, build_language_model


def build(options: BuildOptions) -> BuiltStage:
    """Build the `lm` stage. Raises: ConfigError if the checkpoint or an option is unusable."""
    literal = literal_tokenizer(options.checkpoint)
    max_prompt = options.config.limits.max_prompt_tokens
    return build_language_model(
        options, lambda spec, model: SpokenChatAdapter(spec, model, literal, max_prompt)
    )


class SpokenChatAdapter(TextAdapter):
    """Adapter of a request's task. The prompt is complete, and the engine begins, once the
    transcript edge has ended. Item k of the edge to the voice has answer token k, up to the first
    function call.

    `literal`: tokenizer for transcripts (`literal_tokenizer`). `max_prompt_tokens`: limit of the
    whole prompt. Edges that the request does not use get no items.
    """

    def __init__(
        self, spec: RequestSpec, model: LanguageModel, literal: Tokenizer, max_prompt_tokens: int
    ) -> None:
        super().__init__(spec, model, spoken=SAID)
        self._edges = {edge.name for edge in model.graph.edges_of(spec)}
        self._literal = literal
        self._max_prompt_tokens = max_prompt_tokens
        self._transcripts = Transcripts(len(spec.audio))
        self._is_heard = TRANSCRIPT not in self._edges
        self._prompt: Sequence[int] | None = None
        num_unchecked = max(len(spec.given), self._sampling.min_tokens)
        self._spoken = SpokenText(
            model.tokenizer(),
            self._sampling.stop,
            num_unchecked,
            spec.tools,
            silent_ids=self._sampling.stop_token_ids,
        )
        self._num_sent = 0

    def may_open(self) -> bool:
        return self._is_heard

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        self._transcripts.add(arrays)
        self._is_heard = final
        return ()

    def prompt_ids(self) -> Sequence[int]:
        """Return the prompt with the transcripts in the place of the clips. Raises:
        ContextLengthExceeded if this prompt is longer than the deployment's limit.
        """
        if self._prompt is None:
            self._prompt = insert_transcripts(
                self._spec.prompt_ids, CLIP_ID, self._transcripts.texts(), self._literal
            )
        if len(self._prompt) > self._max_prompt_tokens:
            raise ContextLengthExceeded.of(
                "messages",
                self._max_prompt_tokens,
                f"the prompt has {len(self._prompt)} tokens with the transcript of its audio",
            )
        return self._prompt

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        assert self._is_heard, "a prompt whose transcript has not ended"
        return super().open(logged)

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None or not output.arrays:
            return ()
        ids = output.arrays[TOKEN]
        client = next(item for item in self._tokens.items(output, ids) if item.edge == TEXT)
        said = self._said(ids, is_last=client.final)
        figures = {} if self._num_sent else {PROMPT_TOKENS: len(self.prompt_ids())}
        self._num_sent += 1
        shown = EdgeItem(
            edge=TEXT, walk=client.walk, arrays=client.arrays, final=client.final, figures=figures
        )
        return [item for item in (shown, *said) if item.edge in self._edges]

    def _said(self, ids: np.ndarray, *, is_last: bool) -> Sequence[EdgeItem]:
        """Return the item of the edge to the voice for one token; none after a call has begun."""
        if self._spoken.has_ended:
            return ()
        text = self._spoken.add(int(ids[0]), is_last=is_last)
        arrays = {"ids": ids, "text": np.frombuffer(text.encode(), np.uint8)}
        is_final = is_last or self._spoken.has_ended
        return (EdgeItem(edge=SAID, walk=DECODE, arrays=arrays, final=is_final),)


class SpokenText:
    """The text of an answer to be spoken, which is the text that a client is shown: without control
    tokens and without the stop string that ended it, up to the first function call.

    `num_unchecked`: number of first tokens in whose text no stop string counts. `tools`: how the
    answer may call functions. `silent_ids`: tokens whose text is left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        num_unchecked: int,
        tools: ToolUse | None = None,
        *,
        silent_ids: Sequence[int] = (),
    ) -> None:
        self._silent_ids = silent_ids
        markers = FORMATS[tools.format].markers if tools is not None else ()
        self._detokenizer = IncrementalDetokenizer(tokenizer, markers)
        self._trimmer = StopTrimmer(stops)
        self._num_left = num_unchecked
        self._calls = CallParser(tools) if tools is not None else None

    @property
    def has_ended(self) -> bool:
        """True once a call has begun: nothing after it is spoken."""
        return self._calls is not None and self._calls.num_calls > 0

    def add(self, token: int, *, is_last: bool) -> str:
        """Add the answer's next token; return the new text that no later token can change, or with
        `is_last` all remaining text.
        """
        text = self._shown(token, is_last=is_last)
        if self._calls is None:
            return text
        events = self._calls.add(text) + (self._calls.finish() if is_last else [])
        return "".join(event.text for event in events if isinstance(event, Said))

    def _shown(self, token: int, *, is_last: bool) -> str:
        self._num_left -= 1
        text = self._detokenizer.add([] if token in self._silent_ids else [token])
        if self._num_left < 0:
            text = self._trimmer.add(text)
        if not is_last:
            return text
        return text + self._trimmer.add(self._detokenizer.finish()) + self._trimmer.finish()
