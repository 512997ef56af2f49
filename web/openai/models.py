"""GET /v1/models, /v1/audio/models and /v1/audio/voices; and the refusal of
/v1/audio/translations.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import UnsupportedValue
from web.gateway.gateway import Gateway
from web.http.json_response import json_response
from web.openai.capabilities import capabilities_of, context_tokens
from web.schema.responses import (
    ListedVoice,
    Model,
    ModelList,
    SpeechModel,
    SpeechModelList,
    VoiceList,
)


class ModelRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/audio/translations", self.translations, methods=["POST"]),
            Route("/v1/audio/voices", self.voices),
            Route("/v1/audio/models", self.speech_models),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
        ]

    async def models(self, _request: Request) -> Response:
        return json_response(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        name = str(request.path_params["model"]).rstrip("/")
        if not name:
            return await self.models(request)
        self._gateway.check_model(name)
        return json_response(self._model())

    async def voices(self, _request: Request) -> Response:
        """List the voices, the default voice first. OpenAI's voice names are accepted too, but not
        listed.
        """
        voices = [ListedVoice(id=name, name=name) for name in self._gateway.frontend.voices()]
        return json_response(VoiceList(voices=voices))

    async def speech_models(self, _request: Request) -> Response:
        """List the models for /v1/audio/speech: the served model, or nothing if it does not
        speak.
        """
        model = self._gateway.model
        return json_response(
            SpeechModelList(
                models=[SpeechModel(id=model, name=model)] if self._gateway.speaks else []
            )
        )

    async def translations(self, _request: Request) -> Response:
        raise UnsupportedValue(
            "translations are not served; /v1/audio/transcriptions transcribes speech in its "
            "own language"
        )

    def _model(self) -> Model:
        return Model(
            id=self._gateway.model,
            created=self._gateway.started_s,
            max_model_len=context_tokens(self._gateway),
            capabilities=capabilities_of(self._gateway),
        )
