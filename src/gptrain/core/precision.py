"""Table of the values of `trainer.precision`: types of weights and of matrix multiplications."""

from dataclasses import dataclass

# Bytes of a value, by the name of its type in torch.
TYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Precision:
    """Types of the values in a training step, by their names in torch.

    Attributes:
        weights: Type of the weights, the gradients and the optimizer states.
        autocast: Type to which autocast converts the inputs of matrix multiplications. None
            without autocast. With "float16" Lightning scales the loss.
    """

    weights: str = "float32"
    autocast: str | None = None

    @property
    def matmul(self) -> str:
        """Type of the inputs of matrix multiplications."""
        return self.autocast or self.weights

    @property
    def is_fp16(self) -> bool:
        """True if the inputs of matrix multiplications are fp16."""
        return self.matmul == "float16"


# The names are Lightning's. Its two precisions of NVIDIA's Transformer Engine are missing: gptrain
# does not train in float8.
PRECISIONS = {
    "32-true": Precision(),
    "bf16-mixed": Precision(autocast="bfloat16"),
    "16-mixed": Precision(autocast="float16"),
    "bf16-true": Precision("bfloat16"),
    "16-true": Precision("float16"),
    "64-true": Precision("float64"),
}
SHORT_NAMES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def find_precision(name: str) -> Precision:
    """Return the types of a value of `trainer.precision`, such as "bf16-mixed".

    "auto" and names that are not in PRECISIONS have the types of "32-true".
    """
    return PRECISIONS.get(name, PRECISIONS["32-true"])
