"""
Checkpoints that are no safetensors: GGUF files (llama.cpp's, by the package gguf) and folders of
PyTorch's .bin files. lab/convert.py writes them as folders that every command reads.

A GGUF file holds everything: sizes, tokenizer and weights, most of them rounded to few bits, which
come back as what llama.cpp multiplies by, in bfloat16. Of Llama's q and k it keeps the rows of a
head in another order (pairs of rotary positions side by side, where Hugging Face has halves), and
of a longer context one factor for each rotary frequency.

    source = Gguf("qwen2.5-0.5b-instruct-q4_k_m.gguf")
    source.write_config("folder/"); w = source.get("model.norm.weight", (896,))

Left out: sentencepiece vocabularies (early Llama and Mistral), whose tokenizer.json is better taken
from the model's own page: --tokenizer.
"""
import math
import shutil
from pathlib import Path

from plumbing.checkpoint import Checkpoint
from plumbing.files import cause, read_json, write_json
from plumbing.tokenizer import Tokenizer

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM"}
SIZES = {"num_hidden_layers": "block_count", "hidden_size": "embedding_length",
         "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
         "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
         "max_position_embeddings": "context_length", "rope_theta": "rope.freq_base"}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}
# what a tokenizer splits text into before its merges, by the name that GGUF gives it
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {"qwen2": WORDS % "", "llama-bpe": WORDS % "{1,3}", "smollm": None}
NORMAL, CONTROL, ADDED, UNUSED = 1, 3, 4, 5  # kinds of tokens


class Gguf(Checkpoint):
    """A GGUF file as the tensors of a Hugging Face checkpoint."""

    def __init__(self, path):
        try:
            import gguf
        except ImportError:
            raise ValueError(f"{path}: reading GGUF needs the package gguf; pip install gguf"
                             ) from None
        self.path = self.folder = Path(path)
        try:
            reader = gguf.GGUFReader(path)
            self.fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as e:  # numpy's and struct's, of whatever kind
            raise ValueError(f"{path}: not a GGUF file that can be read ({cause(e)}); download it "
                             "again") from None
        self.dequantize, self.arch = gguf.dequantize, self.fields.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"{path}: the architecture {self.arch!r} is not supported (qwen2, "
                             "qwen3 and llama are)")
        self.tensors = {self.name(t.name): t for t in reader.tensors}
        self.factors = self.tensors.pop("rope_freqs.weight", None)
        self.where = dict.fromkeys(self.tensors, self.path.name)
        self.unused, self.layout, self.dense = set(self.where), None, {}

    def name(self, name):
        """Hugging Face's name of a tensor; what it does not know fits nowhere later."""
        stem, _, kind = name.rpartition(".")
        _, layer, part = [*stem.split(".", 2), "", ""][:3]
        if stem in ENDS:
            return f"{ENDS[stem]}.{kind}"
        return f"model.layers.{layer}.{BLOCK[part]}.{kind}" if part in BLOCK else name

    def check_format(self, quant, formats):
        return None

    def read(self, name, few=None):
        if name not in self.tensors:
            raise ValueError(f"{self.path}: the tensor {name} is missing")
        t = self.tensors[name]
        try:
            w = torch.from_numpy(self.dequantize(t.data, t.tensor_type).copy())
        except NotImplementedError:
            raise ValueError(f"{self.path}: {name} is of type {t.tensor_type.name}, which the "
                             "package gguf cannot read; take another file of this model") from None
        w = w.float().view(*map(int, reversed(t.shape)))
        if self.arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.field("attention.head_count" + "_kv" * ("k_proj" in name), int)
            w = w.view(heads, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
        return w

    def field(self, name, kind, needed=True):
        value = self.fields.get(f"{self.arch}.{name}")
        if (value is not None or needed) and not isinstance(value, kind):
            raise ValueError(f"{self.path}: {self.arch}.{name} is {value!r:.40}, not a "
                             f"{kind.__name__}; this model is not supported")
        return value

    def write_config(self, folder, tokenizer=None):
        """config.json, generation_config.json and the tokenizer's files, from the GGUF's fields or
        copied from the folder `tokenizer`."""
        for refused in ("expert_count", "attention.sliding_window"):
            if self.fields.get(f"{self.arch}.{refused}"):
                raise ValueError(f"{self.path}: {refused} is not supported")
        config = {field: self.field(name, float if field == "rope_theta" else int, False)
                  for field, name in SIZES.items()}
        eps = self.field("attention.layer_norm_rms_epsilon", float)
        ids = {f"{k}_token_id": self.fields.get(f"tokenizer.ggml.{name}_token_id")
               for k, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
        config |= {"architectures": [ARCHITECTURES[self.arch]], "model_type": self.arch,
                   "vocab_size": int(self.tensors["model.embed_tokens.weight"].shape[1]),
                   "rms_norm_eps": float(f"{eps:.6g}"), "rope_scaling": self.rope_scaling(config),
                   "tie_word_embeddings": "lm_head.weight" not in self.where,
                   "torch_dtype": "bfloat16", **ids}
        write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})
        ends = {ids["eos_token_id"], *(self.fields.get(f"tokenizer.ggml.{name}_token_id")
                                       for name in ("eot", "eom"))} - {None}
        write_json(folder / "generation_config.json", ids | {"eos_token_id": sorted(ends)})
        if tokenizer is not None:
            self.check_vocabulary(tokenizer)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                if (Path(tokenizer) / file).is_file():
                    shutil.copyfile(Path(tokenizer) / file, folder / file)
        else:
            self.write_tokenizer(folder)

    def rope_scaling(self, config):
        """config.json's rope_scaling. Llama 3's is found from its factors, whose parameters differ
        in `factor` alone among all published models."""
        if self.factors is not None:
            found = torch.from_numpy(self.factors.data.copy()).double()
            dim = 2 * len(found)
            freq = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.double) / dim)
            kept = ((8192 * freq / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
            factor = round(found.max().item(), 3)
            if not torch.allclose(1 / found, kept + (1 - kept) / factor, rtol=1e-4):
                raise ValueError(f"{self.path}: rope_freqs are not those of a Llama 3; take the "
                                 "safetensors of this model")
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        kind = self.field("rope.scaling.type", str, needed=False)
        if kind in (None, "none"):
            return None
        return {"rope_type": kind, "factor": self.field("rope.scaling.factor", float),
                "original_max_position_embeddings":
                    self.field("rope.scaling.original_context_length", int)}

    def tokens(self):
        """[(token, its kind)], in the order of ids; ValueError if the file has none."""
        tokens = self.fields.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise ValueError(f"{self.path}: holds no tokenizer; give --tokenizer, a folder of this "
                             "model with tokenizer.json")
        kinds = self.fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
        return list(zip(tokens, kinds, strict=True))

    def check_vocabulary(self, folder):
        """ValueError unless the tokenizer in `folder` gives the tokens the ids that they have
        here."""
        if not (Path(folder) / "tokenizer.json").is_file():
            raise FileNotFoundError(f"--tokenizer {folder}: tokenizer.json is missing")
        here = {token: i for i, (token, _) in enumerate(self.tokens())}
        for token, i in Tokenizer(folder).tokenizer.get_vocab(with_added_tokens=True).items():
            if here.get(token) != i:
                raise ValueError(f"--tokenizer {folder}: is another model's: {token!r:.40} is its "
                                 f"id {i}, and {here.get(token)} in {self.path}")

    def write_tokenizer(self, folder):
        kind = self.fields.get("tokenizer.ggml.pre")
        if self.fields.get("tokenizer.ggml.model") != "gpt2" or kind not in SPLITS:
            raise ValueError(f"{self.path}: its tokenizer ({kind!r}) is none of "
                             f"{', '.join(SPLITS)}; give --tokenizer, a folder of this model with "
                             "tokenizer.json")
        tokens = self.tokens()
        merges = [tuple(merge.split(" ")) for merge in self.fields["tokenizer.ggml.merges"]]
        # special tokens too: `tokenizers` numbers those that are not in the vocabulary anew
        vocab = {token: i for i, (token, of) in enumerate(tokens) if of != UNUSED}
        try:
            bpe = models.BPE(vocab, merges, ignore_merges=kind == "llama-bpe")
        except Exception as e:  # the library has no class of its own for it
            raise ValueError(f"{self.path}: its merges do not fit its tokens ({cause(e)}); give "
                             "--tokenizer, a folder of this model with tokenizer.json") from None
        made = tokenizers.Tokenizer(bpe)
        made.normalizer = normalizers.NFC() if kind == "qwen2" else None
        split = Split(Regex(SPLITS[kind]), "isolated") if SPLITS[kind] else Digits(True)
        made.pre_tokenizer = Sequence([split, ByteLevel(False, use_regex=kind == "smollm")])
        made.decoder = decoders.ByteLevel()
        made.add_tokens([AddedToken(token, special=of == CONTROL, normalized=False)
                         for token, of in tokens if of in (CONTROL, ADDED)])
        made.save(str(folder / "tokenizer.json"))
        special = {f"{name}_token": tokens[i][0] for name, field in
                   (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
                   if (i := self.fields.get(f"tokenizer.ggml.{field}_token_id")) is not None}
        write_json(folder / "tokenizer_config.json", special | {
            "chat_template": self.fields.get("tokenizer.chat_template"),
            "tokenizer_class": "PreTrainedTokenizerFast"})


class Bins(Checkpoint):
    """The tensors of a folder of pytorch_model*.bin files."""

    def __init__(self, folder):
        self.folder, self.layout, self.dense = Path(folder), None, {}
        index = self.folder / "pytorch_model.bin.index.json"
        files = {self.folder / "pytorch_model.bin"}
        if index.is_file():
            names = read_json(index, {"weight_map": dict}, ["weight_map"])["weight_map"].values()
            files = {self.folder / Path(str(name)).name for name in names}
        self.tensors, self.where = {}, {}
        for file in sorted(files):
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as e:  # pickle's, zipfile's, torch's own
                raise ValueError(f"{file}: not a readable .bin file ({cause(e)}); download it "
                                 "again") from None
            self.tensors |= found
            self.where |= dict.fromkeys(found, file.name)
        self.unused = set(self.where)

    def read(self, name, few=None):
        if name not in self.tensors:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        return self.tensors[name]
