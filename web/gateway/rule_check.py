"""Check of the rules that requests set for their answers: before they are submitted, in a process
that can be ended.
"""

from collections import OrderedDict

from fleet.core.errors import BadInput
from fleet.core.request import Constraint, Sampling
from fleet.processing import Frontend
from fleet.processing.decoder_pool import DecoderPool
from fleet.processing.decoding import RuleJob
from web.schema.answer_rules import AnswerRule

MAX_KNOWN = 1000


class RuleCheck:
    """Checker of the rules that requests set for their answers, one at a time. Rules that were
    found valid are not checked again. `frontend`: source of the tokens that rules may name.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._pool = DecoderPool(1)
        self._frontend = frontend
        self._known: OrderedDict[Constraint, None] = OrderedDict()

    async def check(self, rule: AnswerRule, main: Sampling) -> None:
        """Check the rule of a request. `main`: sampling of the stage that answers.

        Raises: BadInput if the rule cannot be enforced, or if the request sets `ignore_eos`, which
        forbids the end token that a rule needs.
        """
        if main.ignore_eos:
            raise BadInput(
                f"ignore_eos: {rule.where} sets a rule, which ends the answer; remove one of them",
                param="ignore_eos",
            )
        if rule.constraint not in self._known:
            job = RuleJob(
                constraint=rule.constraint,
                where=rule.where,
                num_ids=self._frontend.num_ids,
                named=self._frontend.tools.control_tokens,
            )
            await self._pool.check_rule(job)
        self._known[rule.constraint] = None
        self._known.move_to_end(rule.constraint)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def close(self) -> None:
        """End the process, even while it checks a rule."""
        self._pool.close()
