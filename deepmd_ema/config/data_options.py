"""The options of a model that may change what is computed from data and kept for later runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import plain

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig

# These options shape weights. Statistics of features that depend on weights are stored under the
# hash of a section, so that other weights have other statistics.
_OF_WEIGHTS = """
    a_compress_e_rate a_compress_rate a_compress_use_split a_dim activation_function
    add_tebd_to_repinit_out atten_f_mix atten_o_proj atten_v_proj attn attn1_hidden attn1_nhead
    attn2_has_gate attn2_hidden attn2_nhead attn_dotr attn_layer attn_mask axis_neuron basis_type
    block_attn_res case_film_embd channels concat_output_tebd dim_case_embd direct_dist e_dim
    edge_cartesian edge_init_use_dist edge_norm extra_node_l ffn_blocks ffn_neurons ffn_so3_grid
    focus_dim full_attn_res g1_dim g1_out_conv g1_out_mlp g2_dim glu_activation grid_branch
    grid_mlp interpolate kmax l_schedule layer_scale lebedev_quadrature lmax ln_eps m_schedule
    message_node_s2 message_node_so3 mixing_layers mlp_bias mmax n_atten_head n_blocks n_dim
    n_focus n_multi_edge_message n_radial neuron nlayers node_cartesian node_wise_s2 node_wise_so3
    normalize precision radial_mlp radial_modes radial_so2_mode radial_so2_rank readout_layers
    resnet_dt s2_activation sandwich_norm scaling_factor seed sequential_update so2_attn_res
    so2_norm so3_readout temperature tebd_dim tebd_input_mode three_body_neuron trainable
    trainable_ln update_g1_has_attn update_g1_has_conv update_g1_has_drrd update_g1_has_grrg
    update_g2_has_attn update_g2_has_g1g1 update_h2 update_residual update_residual_init
    update_style use_amp use_econf_tebd use_env_seed use_sqrt_nnei use_tebd_bias
"""
_OF_START = "finetune_bias finetune_head"  # choose first weights from a file
_OF_NAMES = "model_branch_alias"
_OF_MODELS = "data_stat_protect set_davg_zero"  # are applied to the sums whenever a model gets them
WITHOUT_INFLUENCE = frozenset(
    " ".join([_OF_WEIGHTS, _OF_START, _OF_NAMES, _OF_MODELS]).split()
)
"""Options without influence on data. Every other one counts, a new one as well."""


def data_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options of a model on which statistics, checks or splits of data may depend."""
    options: dict[str, Any] = _with_influence(plain(model))
    return options


def _with_influence(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _with_influence(part)
            for name, part in value.items()
            if name not in WITHOUT_INFLUENCE
        }
    return (
        [_with_influence(part) for part in value] if isinstance(value, list) else value
    )
