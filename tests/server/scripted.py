"""A real DeepSeek-V3 checkpoint that says known things: after a start token it walks through a script, token by token.

Its weights are random but for one thing: the output row of a script's next token points at the embedding of the token before.
Texts that no trained model would say, cut into tokens at any byte, so come out of the real engine. After any other token
random bytes follow.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from mla_serve.demo.tokenizer import ASSISTANT, EOS, SPECIAL, save_tokenizer

MAX_LEN = 4096
HIDDEN = 128

UNICODE = "客单价 👩‍👩‍👧 ďábel ✓ naïve 价客"
STOP = ["ABC ", "DEF", "G", "HI", "J", " then b", ",c", " end DEFG", "HIK", " DEFGH"]
CHAT = ["Of", " course", ": la", "tent."]


def pieces(text: str, used: set[bytes]) -> list[bytes]:
    """Cuts UTF-8 text into the shortest pieces of which none is in use yet; adds them to `used`."""
    data, found, start = text.encode(), [], 0
    while start < len(data):
        end = start + 1
        while data[start:end] in used:
            end += 1
        found.append(data[start:end])
        used.add(data[start:end])
        start = end
    return found


def scripts() -> dict[str, list[bytes]]:
    """Start token -> the tokens that follow it; none is in two places, since what follows depends on the last token."""
    known = {"<|stop|>": [p.encode() for p in STOP], ASSISTANT: [p.encode() for p in CHAT]}
    used = {piece for script in known.values() for piece in script}
    return {**known, "<|unicode|>": pieces(UNICODE, used)}


def make_checkpoint(directory: Path) -> None:
    """Writes model, tokenizer and chat template."""
    import torch
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    def spell(data: bytes) -> str:
        """Bytes in the alphabet that byte-level vocabularies are written in."""
        plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        rest = [byte for byte in range(256) if byte not in plain]
        return "".join(chr(byte) if byte in plain else chr(256 + rest.index(byte)) for byte in data)

    special = [*SPECIAL, *(start for start in scripts() if start not in SPECIAL)]
    names = [*special, *(spell(bytes([b])) for b in range(256))]
    names += [name for script in scripts().values() for piece in script if (name := spell(piece)) not in names]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])

    config = DeepseekV3Config(
        vocab_size=len(names), hidden_size=HIDDEN, intermediate_size=HIDDEN, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, first_k_dense_replace=1, q_lora_rank=None,
        kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=MAX_LEN,
        initializer_range=0.08, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        embed.normal_()
        head.normal_(std=0.3)
        chains = [[ids[start], *(ids[spell(piece)] for piece in script)] for start, script in scripts().items()]
        told = [token for chain in chains for token in chain]
        # A script's tokens have an axis of the hidden space each, the others share what is left: the two hardly meet.
        embed[:, : len(told)] = 0.0
        embed[told] = HIDDEN**0.5 * torch.eye(len(told), HIDDEN)
        head[[*told, ids[EOS]]] = 0.0
        for chain in chains:
            for before, after in pairwise([*chain, ids[EOS]]):
                head[after] += 3.0 / HIDDEN**0.5 * embed[before]
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (directory / "config.json").write_text(json.dumps(fields))
