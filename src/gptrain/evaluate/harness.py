"""A run folder as a model of lm-evaluation-harness, without an export.

    import lm_eval
    from gptrain.evaluate.harness import RunModel

    results = lm_eval.simple_evaluate(model=RunModel("outputs/a"), tasks=["arc_easy"])

Importing this file needs the package `lm-eval`: pip install 'gptrain[evaluate]'.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, cast

from gptrain.assemble.load import load
from gptrain.text.scoring import score_continuations
from gptrain.text.writing import generate

# The type checker runs without this package.
UTILS: Any = import_module("lm_eval.utils")
TemplateLM: Any = import_module("lm_eval.api.model").TemplateLM


class RunModel(TemplateLM):
    """Model of lm-evaluation-harness that scores and generates with the net of a run.

    Args:
        folder: Folder of the run, the checkpoint or the export.
        device: Device of the net, such as `cuda`.

    Raises:
        FileNotFoundError: If there is no run in the folder. The other errors are those of
            `gptrain.load`.
    """

    def __init__(self, folder: str | Path, device: str = "cpu"):
        super().__init__()
        net, self.tokenizer = cast(Any, load(folder, with_tokenizer=True))
        self.net = net.to(device)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that stands for an empty context: the end token, or 0 without one."""
        return self.tokenizer.end_id or 0

    def tok_encode(self, string: str, **options: Any) -> list[int]:
        """Return the token ids of a text.

        Args:
            string: Text.
            options: Options of lm-evaluation-harness, which have no effect.
        """
        return self.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[Any], **options: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [score_continuations(self.net, [pair])[0] for pair in pairs]

    def loglikelihood_rolling(self, requests: list[Any], **options: Any) -> list[float]:
        """Return the log probability of each text in nats, 0 for a text without tokens.

        A text is divided into windows as long as the net can read, as for the harness's own models
        of transformers: the first token follows `eot_token_id`, a later window follows the token
        before it, and the last window begins so early that it is as long as the others.

        Args:
            requests: Requests of lm-evaluation-harness, each with a text as its first argument.
            options: Options of lm-evaluation-harness, which have no effect.

        Raises:
            DataError: If a text has a character that the tokenizer has no token for.
        """
        log_probs = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            longest = getattr(self.net, "max_seq_len", None) or max(1, len(tokens))
            windows = UTILS.get_rolling_token_windows(tokens, self.eot_token_id, longest, 1)
            pairs = map(UTILS.make_disjoint_window, windows)
            log_probs.append(sum(score_continuations(self.net, [pair])[0][0] for pair in pairs))
        return log_probs

    def generate_until(self, requests: list[Any], **options: Any) -> list[str]:
        """Return the most probable continuation of each prompt up to a stop text.

        Args:
            requests: Requests of lm-evaluation-harness, each with two arguments: the prompt and a
                dict of `until` (stop texts) and `max_gen_toks` (largest number of tokens, 256).
            options: Options of lm-evaluation-harness, which have no effect.

        Raises:
            ValueError: If a prompt has no token.
            DataError: If a prompt has a character that the tokenizer has no token for.
        """
        texts = []
        for prompt, how in (request.args for request in requests):
            until = how.get("until", ())
            stop = [until] if isinstance(until, str) else until
            limit = how.get("max_gen_toks", 256)
            texts += generate(self.net, self.tokenizer, [prompt], limit, temperature=0, stop=stop)
        return texts
