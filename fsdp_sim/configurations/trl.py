"""TRL's arguments for SFT, DPO, KTO and reward models: the YAML of its command line, or the call in a Python file.

Source: trl 1.16.0, `trl.trainer.base_config._BaseConfig` (bf16 and checkpointing are on by default), `SFTConfig` and
its siblings, `trl.trainer.model_config.ModelConfig`. The rest is `fsdp_sim.configurations.trainer`.
"""

from __future__ import annotations

from fsdp_sim.configurations.adapters import lora_plan, plan_of_calls
from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.loaded import chunked_loss, dims_of, of_preferences
from fsdp_sim.configurations.said import Asked, Said, dtype_of
from fsdp_sim.configurations.trainer import plan_of_arguments, say_who_shards

UNPAIRED = ("kto", "apo_zero_unpaired")  # losses of KTO, each over one answer


def read(keys: Keys, asked: Asked) -> Said:
    said = Said(plan=plan_of_arguments(keys, asked, {}), model=keys["model_name_or_path"])
    plan = said.plan | {"seq_len": keys["max_length"]}
    if "max_length" in keys.given and "max_length" not in keys:
        keys.remarks.append(
            f"max_length of {keys.file} is null: nothing is cut off, so --seq-len says how long a sequence is."
        )
    if keys.others:
        keys.remarks.append(
            f"If the script of {keys.file} trains with transformers' Trainer, give --config-format trainer: bf16, "
            f"checkpointing and max_length have defaults of their own in TRL."
        )
    if keys["use_liger_kernel"]:
        plan |= chunked_loss(keys, "use_liger_kernel", asked.given.get("seq_len", plan["seq_len"] or 1024))
    of_beta = {"max_prompt_length", "loss_type", "precompute_ref_log_probs", "desirable_weight"}
    of_ones = "KTOConfig" in keys.called or "desirable_weight" in keys or keys.given.get("loss_type") in UNPAIRED
    if keys.called & {"DPOConfig", "KTOConfig"} or ("beta" in keys and any(key in keys for key in of_beta)):
        of_preferences(keys, plan, pairs=not of_ones)
    elif "RewardConfig" in keys.called or "center_rewards_coefficient" in keys:
        of_preferences(keys, plan, left_out="a reward model's head of one number, in whose place is the model's own,")
    if keys["attn_implementation"] == "eager":
        plan["attention_impl"] = "math"
    if keys["use_peft"]:
        plan |= lora_plan(keys, keys["lora_r"], keys["lora_target_modules"], "lora_target_modules")
    if keys["load_in_4bit"]:
        if not keys["use_peft"]:
            raise keys.wrong("load_in_4bit", True, "False", "weights of four bits are trained by LoRA alone: use_peft")
        plan["base_quantization"] = keys["bnb_4bit_quant_type"] + "_double_quant" * keys["use_bnb_nested_quant"]
    plan |= plan_of_calls(keys)
    if keys["dtype"] == "auto":
        keys.remarks.append(f"dtype of {keys.file} is that of the checkpoint; fp32, unless model_dtype says another.")
    else:
        said.dims = dims_of(keys, plan, dtype_of(keys["dtype"]))
    say_who_shards(keys, plan)
    said.plan = plan
    return said
