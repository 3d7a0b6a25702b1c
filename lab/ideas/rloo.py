"""RLOO: each completion is compared with the mean of the others of its group (arXiv 2402.14740).

    python lab/ideas/rloo.py --out runs/rloo-s0
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpo
import train


def advantages(rewards, scale=True):
    """rewards (P, G) -> (P, G)."""
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return (rewards - others).float()


grpo.advantages = advantages

if __name__ == "__main__":
    sys.exit(train.main())
