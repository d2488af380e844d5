#!/bin/bash
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true"
python train_jax.py --config big.yaml
