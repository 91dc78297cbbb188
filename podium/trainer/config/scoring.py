"""Which keys of scoring go together. Imports without torch."""

from podium.trainer.config.reward import RewardFunctionConfig, ScoringConfig
from podium.utils.errors import UserError

_FUNCTION = "custom_reward_function"


def has_function(scoring: ScoringConfig, function: RewardFunctionConfig) -> bool:
    """Whether the user has chosen what scores, beside a reward model."""
    chosen = function.path is not None or bool(function.sources) or function.name != RewardFunctionConfig.name
    return chosen or scoring.reward_manager == "remote"


def check_scoring(scoring: ScoringConfig, function: RewardFunctionConfig) -> None:
    """Refuses combinations that score nothing.

    Raises:
        UserError: names the key and what to do.
    """
    if scoring.reward_manager == "remote" and not (scoring.url or "").startswith(("http://", "https://")):
        raise UserError(f"reward_model.url={scoring.url}: reward_manager=remote needs an http:// or https:// address")
    if scoring.reward_manager == "batch" and function.path is None:
        raise UserError(
            f"reward_model.reward_manager=batch needs {_FUNCTION}.path: built-in rewards score one response at a time"
        )


def scoring_rules(scoring: ScoringConfig, function: RewardFunctionConfig) -> list[tuple[str, str]]:
    """Keys (or parents of keys) that this way of scoring never reads, and why."""
    manager = scoring.reward_manager
    rules = []
    if manager == "remote":
        rules += [(_FUNCTION, "with reward_model.reward_manager=remote"), ("reward_model.num_workers", "with a server")]
    else:
        rules += [(f"reward_model.{leaf}", "without reward_manager=remote") for leaf in ("url", "rate_limit")]
    if manager == "batch":
        rules += [(f"{_FUNCTION}.sources", "with reward_model.reward_manager=batch")]
        leaves = ("max_concurrency", "max_retries")
        rules += [(f"reward_model.{leaf}", "with reward_model.reward_manager=batch") for leaf in leaves]
    elif function.sources:
        rules += [(f"{_FUNCTION}.{leaf}", f"beside {_FUNCTION}.sources") for leaf in ("path", "name", "reward_kwargs")]
    elif function.path is None and function.name == RewardFunctionConfig.name:
        rules.append((f"{_FUNCTION}.reward_kwargs", f"without {_FUNCTION}.path, or the name of a built-in reward"))
    return rules
