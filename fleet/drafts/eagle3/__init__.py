"""The draft head of EAGLE-3: one decoder layer that proposes the next tokens of a target model from
the target's own hidden states.

Alignment. The head runs at positions of the target. At position i its input is the embedding of
token i + 1 and the target's taps of position i; its output predicts token i + 2. So the head needs
a token that is sampled, but not yet fed to the target. In later steps the head reads its own output
in place of the taps, at the next position, with the embedding of the token that it drafted.

For example, tokens 0 to 3 are a prompt, and the target has computed them and sampled token 4. The
head first computes the positions that it has not read:

    position   embedding of   hidden state                predicts
    0          token 1        fused taps of position 0    (token 2)
    1          token 2        fused taps of position 1    (token 3)
    2          token 3        fused taps of position 2    (token 4)
    3          token 4        fused taps of position 3    token 5: the first draft
    4          first draft    own output at position 3    token 6: the second draft
    5          second draft   own output at position 4    token 7: the third draft

The head writes keys and values at each position, and attends to all positions up to it. The target
then computes positions 4 to 7 (token 4 and the drafts) and so samples tokens 5 to 8 as far as the
drafts are right. The head's rows at positions 4 and 5 were computed from its own outputs: positions
whose tokens are accepted are computed again from the target's taps, which overwrites their keys and
values.

Taps are the hidden states that *enter* three layers of the target: tap i is the input of layer i,
which is the output of layer i - 1; tap 0 is the embedding. Formats of other programs count
differently (`speculators`, `sglang`).

In training the same steps run for all positions together (`loss`): the keys of the first step are
seen causally, and each later step adds one key that only its own row sees.

Sources: Li et al., "EAGLE-3" (2025), sections 3.1 and 3.2; vLLM 0.32, `llama_eagle3.py` and
`llm_base_proposer.py`; speculators 0.9, `models/eagle3/core.py`; SpecForge,
`specforge/core/eagle3.py`.
Legend of the package: N rows, H hidden size of the target, T = 3H taps, V vocabulary of the target,
D draft vocabulary, S rows drafted from, h query heads, k key/value heads, d head size, I inner
width.
"""
