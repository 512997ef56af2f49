"""State shared by the parts of one voice session, and the queue through which the parts report
events to the session.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from web.gateway.gateway import Gateway
from web.realtime.audio.played_text import SpeakingRate
from web.realtime.audio.vad import VadBatcher
from web.realtime.clock import Clock
from web.realtime.conversation import Clip, Conversation, Item
from web.realtime.protocol import server_events as server
from web.realtime.protocol.settings import Settings
from web.realtime.transport.client_connection import ClientConnection

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Queue that passes events to one handler, in order. An event that is emitted while the handler
    runs is passed after the handler has returned.
    """

    def __init__(self, handle: Callable[[E], None]) -> None:
        self._handle = handle
        self._pending: deque[E] = deque()
        self._is_handling = False

    def emit(self, event: E) -> None:
        self._pending.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._pending:
                self._handle(self._pending.popleft())
        finally:
            self._is_handling = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAudio:
    """Audio state that all sessions of a gateway share: the learned speaking rate of the voices,
    and the batches of voice detection.
    """

    rate: SpeakingRate = field(default_factory=SpeakingRate)
    vad: VadBatcher = field(default_factory=VadBatcher)


@dataclass(slots=True, kw_only=True)
class SessionContext:
    """State of one voice session that all of its parts read: settings, conversation, connection.
    Contains no reference to the parts.

    `epoch`: fencing token with which this gateway holds the session in Redis.
    """

    gateway: Gateway
    settings: Settings
    conversation: Conversation
    conversation_id: str
    connection: ClientConnection
    clock: Clock
    shared: SharedAudio
    epoch: int = 0

    def send(self, event: server.ServerEvent) -> None:
        self.connection.send(event)

    def add_item(self, item: Item, clips: dict[str, Clip], after: str | None = None) -> None:
        """Add an item to the conversation and notify the client. `clips` is the item's audio by
        clip name; `after` is the id of the item before it, None for the end of the conversation.

        Raises: NotFound, BadInput.
        """
        removed = self.conversation.add(item, clips, after)
        previous, body = self.conversation.previous(item.id), self.conversation.body(item)
        self.send(server.ItemAdded(previous_item_id=previous, item=body))
        self.send(server.ItemDone(previous_item_id=previous, item=body))
        for item_id in removed:
            self.send(server.ItemDeleted(item_id=item_id))
