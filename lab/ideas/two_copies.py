"""Two copies of the weights, as with an inference engine beside a trainer: four bits (--quant)
sample, 16 bits are trained, and they share an adapter. The ratio is against the sampler or, by a
truncated weight, against the trainer itself:

    python lab/ideas/two_copies.py --out runs/two-s0
    python lab/ideas/two_copies.py --old-logp trainer --out runs/two-trainer-s0
"""
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpo
import lora
import sample
import train

load, add, install = sample.load_policy, lora.add_lora, sample.set_engine
twins = {}  # model: its copy in 16 bits


def load_both(args):
    if args.lora_rank == 0 or args.awq or args.aqn_scope == "both":
        raise ValueError("two copies share an adapter and nothing else: leave out --lora-rank 0, "
                         "--awq and --aqn-scope both")
    model, tok = load(args)
    twins[model], _ = load(Namespace(**vars(args) | {"quant": "none"}))
    return model, tok


def add_to_both(model, *rest):
    params = add(model, *rest)
    add(twins[model], *rest)
    both = lora.lora_layers(model), lora.lora_layers(twins[model])
    for (_, own), (_, twin) in zip(*both, strict=True):
        twin.A, twin.B = own.A, own.B
    return params


def install_on_both(model, engine):
    install(model, engine)
    install(twins[model], engine)


def through_twin(f):
    def call(model, *rest):
        twins[model].checkpointing = model.checkpointing
        return f(twins[model], *rest)
    return call


sample.load_policy, lora.add_lora, sample.set_engine = load_both, add_to_both, install_on_both
grpo.update = through_twin(grpo.update)
grpo.record_trainer_logprobs = through_twin(grpo.record_trainer_logprobs)

if __name__ == "__main__":
    sys.exit(train.main())
