#!/usr/bin/env bash
# Pre-training on one node; arguments after the script's name go to Megatron-LM.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --disable-bias-linear
    --transformer-impl transformer_engine
    --num-experts 32
    --moe-router-topk 4
    --moe-token-dispatcher-type alltoall
    --moe-permute-fusion    # moe_preprocess captures the first permute; the unfused one syncs with the host
    --expert-model-parallel-size 8
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 64
    --train-iters 1000
    --lr 3e-4
    --bf16
    --cuda-graph-impl transformer_engine
    --cuda-graph-scope moe_router moe_preprocess
    --te-rng-tracker
    --moe-pad-experts-for-cuda-graph-inference
)

torchrun --nproc-per-node 8 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "$@"
