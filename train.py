"""Pretrain a Transformer, dense or sparse, from text to checkpoint.

    python train.py                                          # sparse, on Python's own source: minutes on a CPU
    python train.py ffn=dense_relu                           # its dense twin
    python train.py model=124m ffn=sparse data=fineweb_edu   # one GPU
    torchrun --nproc_per_node=8 train.py model=124m ffn=sparse data=fineweb_edu
    python train.py -m ffn.l1.coef=0,1e-4,1e-3               # a sweep

Keys are documented in twell/config.py, metrics in twell/tracking.py. Everything of a run lies in runs/NAME/; the same
command started again continues it.
"""

import math
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from data.baselines import reference_losses
from data.loader import Loader, validation_batches
from data.prepare import prepare
from data.stream import StreamLoader
from twell import checkpoint, graphs, memory, parallel
from twell.checks import validate
from twell.config import Config, accumulation_steps, hydra_main, padded_vocab_size, total_steps
from twell.console import console_line, validation_line
from twell.control import L1Control
from twell.errors import UserError
from twell.evaluate import validate_model
from twell.faults import WAITING_FOR_DATA, StopRequests, Watchdog, explain_lost_ranks
from twell.flops import peak_flops
from twell.forced import force_firing
from twell.generate import sample_text
from twell.measures import ValidationSparsity, executed_share
from twell.model import Transformer
from twell.neurons import DeadNeurons
from twell.optim import Schedule, build_optimizer, optimizer_state, set_lr
from twell.profiling import Profiler
from twell.routing import Routing
from twell.run import Progress, command_to_go_on, describe_run, open_run, run_name, start_from, swept_keys
from twell.saver import Saver
from twell.sharded import ShardedWeights, copy_rows, gathered
from twell.sparsity import SparsityMeter
from twell.step import Step
from twell.tracking import StopWatch, Tracker
from twell.weights import Weights


@hydra_main
def main(cfg: Config) -> None:
    with ExitStack() as closing:  # whatever ends the run, its files are closed
        with explain_lost_ranks():
            train(cfg, closing)


def train(cfg: Config, closing: ExitStack) -> None:
    # ---- Everything that can be refused is refused here, before any work.
    validate(cfg, parallel.world_size_from_environment())
    overrides = list(HydraConfig.get().overrides.task)
    swept = swept_keys(sys.argv[1:]) if HydraConfig.get().mode == RunMode.MULTIRUN else None
    name = run_name(cfg, overrides, swept)
    ranks = parallel.start(cfg.device, cfg.parallel.timeout)
    torch.manual_seed(cfg.seed + ranks.rank)

    # ---- Data and run folder: the main rank makes them, the others find them.
    with parallel.main_first(ranks):
        prepared = prepare(cfg.data, val_tokens=cfg.eval.tokens)
        tokenizer = prepared.tokenizer
        vocab_size = padded_vocab_size(cfg, tokenizer.n_vocab)
    stop_requested = StopRequests(cfg.stop_timeout)
    closing.callback(stop_requested.close)
    run, resumed = None, None
    with parallel.main_first(ranks):
        if ranks.is_main:
            run, resumed = open_run(cfg, name, tokenizer, print, closing)
    run, resumed = parallel.from_main((run, resumed))
    steps = total_steps(cfg)
    at = Progress(**resumed["progress"]) if resumed else Progress()
    if at.step >= steps:
        if ranks.is_main:
            print(f"{run} is complete: step {at.step}, validation loss {at.val_loss} (of step {at.val_step})")
            print(f"{command_to_go_on(run.name, overrides)} trains on to step N; resume=never starts over")
        parallel.finish()
        return

    # ---- Model. Its weights in the compute dtype are what is called; their fp32 masters are what is trained and saved.
    closing.enter_context(memory.explain_out_of_memory(cfg, ranks.device))
    is_cuda = ranks.device.type == "cuda"
    compute_dtype = parallel.compute_dtype(cfg.dtype, ranks.device.type)
    divided = cfg.parallel.mode != "ddp" and ranks.world_size > 1
    with torch.device("meta" if divided else "cpu"):
        model = Transformer(cfg.model, cfg.ffn, vocab_size, tokenizer.n_vocab, compute_dtype, cfg.recompute)
    if divided:
        weights = ShardedWeights(model, compute_dtype, cfg.parallel, ranks)
        model.init_weights(cfg.seed, copy_rows)
    else:
        model.init_weights(cfg.seed)
        model.to(ranks.device)
        weights = Weights(model, compute_dtype)
    if is_cuda if cfg.compile is None else cfg.compile:
        model.compile_parts()
    routing = Routing(model, ranks.device, compute_dtype)  # what the sparse kernels remember from step to step

    # ---- Optimizer and schedule. The schedule's end is fixed when the run is first started: a longer run does not
    # stretch it unless optim.schedule.horizon says so.
    optimizers = build_optimizer(weights.masters, cfg.optim, ranks.device, weights.flat)
    per_unit = cfg.batch.tokens if cfg.optim.schedule.unit == "steps" else 1  # tokens
    first_length = resumed["horizon_tokens"] if resumed else steps * cfg.batch.tokens
    horizon = cfg.optim.schedule.horizon or first_length // per_unit
    horizon_tokens = horizon * per_unit
    schedule = Schedule(cfg.optim.schedule, horizon)

    # ---- Batches: the tokens of a step depend on (seed, step) alone; validation windows are always the same.
    shape = {"seq_len": cfg.model.seq_len, "micro": cfg.batch.micro, "mask_documents": cfg.data.mask_documents}
    place = {"device": ranks.device, "rank": ranks.rank, "world_size": ranks.world_size}
    batch_sequences = cfg.batch.tokens // cfg.model.seq_len
    if cfg.data.streaming:
        loader = StreamLoader(cfg.data, prepared, batch_sequences=batch_sequences, **shape, **place)
    else:
        loader = Loader(prepared, batch_sequences=batch_sequences, seed=cfg.seed, **shape, **place)
    val_batches = validation_batches(prepared, tokens=cfg.eval.tokens, **shape, **place)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).long().to(ranks.device)  # [n_vocab]
    if cfg.forced_nnz is not None:
        sample = validation_batches(prepared, tokens=cfg.batch.micro * cfg.model.seq_len, **shape)[0].tokens
        force_firing(model, cfg.forced_nnz, sample.to(ranks.device), masters=weights.masters)

    # ---- Sparsity: the penalty's coefficients, what is counted, and the dead neurons.
    penalty = L1Control(cfg, ranks.device, horizon_steps=horizon_tokens // cfg.batch.tokens)
    meter = SparsityMeter(cfg.model.n_layers, cfg.ffn.d_ff, cfg.model.seq_len, ranks.device)
    neurons = DeadNeurons(cfg.ffn.dead, cfg.model.n_layers, cfg.ffn.d_ff, ranks.device)
    has_zeros = cfg.ffn.kind != "dense_silu"
    measures = ValidationSparsity(cfg.model.n_layers, cfg.ffn.d_ff, vocab_size, ranks.device) if has_zeros else None

    # ---- What a checkpoint holds; continue where the last one was taken.
    state = weights.whole_state(optimizer_state(weights.masters, optimizers))
    saved = weights.state() | state | penalty.state() | neurons.state()
    if resumed:
        checkpoint.restore(run, at.step, saved, ranks.rank, ranks.device)
        weights.refresh()
        loader.load_state_dict(resumed["loader"])
        routing.load_state_dict(checkpoint.load_own(run, at.step, ranks.rank))
    elif cfg.init is not None:
        start_from(Path(cfg.init), weights.state(), tokenizer)
        weights.refresh()
    if ranks.is_main:
        describe_run(run, cfg, tokenizer)

    # ---- Say what will happen.
    wandb_id = resumed["wandb_id"] if resumed else None
    tracker = Tracker(
        cfg, run, is_main=ranks.is_main, total_steps=steps, wandb_id=wandb_id, step=at.step, swept=swept or ()
    )
    closing.callback(tracker.close)
    closing.callback(loader.close)
    log = tracker.print
    n_micro = accumulation_steps(cfg, ranks.world_size)
    log(f"{run}: {model.n_params:,} parameters, {model.n_params_without_embedding:,} without the embedding")
    log(
        f"{steps} steps of {cfg.batch.tokens:,} tokens = {ranks.world_size} ranks x {n_micro} micro-batches x "
        f"{cfg.batch.micro} sequences x {cfg.model.seq_len}, on {ranks.device.type} in {compute_dtype}"
        + (f", {cfg.parallel.mode}" if ranks.world_size > 1 else "")
    )
    if cfg.forced_nnz is not None:
        log(f"forced_nnz={cfg.forced_nnz}: only speed means anything: the learning rate is 0, and nothing is saved")
    if resumed:
        log(f"resuming from step {at.step}")
    elif cfg.init is not None:
        log(f"starting from the weights of {cfg.init}")
    if horizon_tokens != steps * cfg.batch.tokens:
        log(f"the schedule ends at {horizon} {cfg.optim.schedule.unit}; optim.schedule.horizon=N changes that")
    reference = resumed["reference"] if resumed else None
    if reference is None:  # what counting reaches on the validation windows of all ranks
        reference = reference_losses(prepared, validation_batches(prepared, tokens=cfg.eval.tokens, **shape))
    peak = peak_flops(ranks.device)
    use_graph = graphs.wanted(cfg, ranks.device, ranks.world_size, model.n_params)
    if use_graph:
        routing.expect_graph()
    step = Step(
        model,
        weights,
        optimizers,
        l1_weight=penalty.weight,
        batch_tokens=cfg.batch.tokens,
        clip=cfg.optim.clip,
        overflowed=routing.overflowed,
        count=meter.add if has_zeros else None,
        graph_signature=routing.signature if use_graph else None,
    )
    saver = Saver(run, saved, ranks, background=cfg.checkpoint.background, log=log)
    closing.callback(saver.finish, wait=True)
    watchdog = Watchdog(cfg.parallel.timeout)
    closing.callback(watchdog.close)
    watch = StopWatch()
    profiler = Profiler(run, cfg.profile if ranks.is_main else 0, log)
    closing.callback(profiler.close)
    totals = torch.zeros_like(step.sums)  # nats, L1, tokens since the last record
    nonfinite_in_a_row, waited, stop = 0, 0.0, False

    # ---- The loop: one iteration is one optimizer step.
    closing.enter_context(memory.collecting_by_hand())
    while at.step < steps and not stop:
        watch.start()
        lr_share = schedule.factor(at.step + 1, at.tokens + cfg.batch.tokens) if cfg.forced_nnz is None else 0.0
        set_lr(optimizers, lr_share)
        penalty.set_step(at.step)
        watchdog.beat(at.step, WAITING_FOR_DATA)
        batches = loader.next()
        watchdog.beat(at.step)
        while True:  # once, unless a buffer of the sparse kernels turns out too small
            meter.drop()  # what a step without an update has counted
            step.gradients(batches)
            word = step.finish(stop_requested())
            if not word.overflowed:
                break
            at.repeated += 1
            log(f"step {at.step + 1}: a buffer of the sparse kernels was too small; repeating with larger ones")
            routing.update()
        saver.before_update()
        stop = word.stop
        if word.nonfinite:
            nonfinite_in_a_row += 1
            at.skipped += 1
            log(f"step {at.step + 1}: the loss or the gradient norm is not finite; the weights stay as they are")
        else:
            nonfinite_in_a_row = 0
            totals += step.sums
            step.update()
            if has_zeros:
                n_counted = step.sums[2]
                neurons.update(meter.step.fired, n_counted=n_counted)
                if penalty.controlled:
                    penalty.observe(parallel.sum_over_ranks(meter.step.l0_sum()), n_counted)
                meter.accept()
        # Also after a step that was skipped: the next check may be many steps away.
        checking = has_zeros and neurons.due(at.tokens + cfg.batch.tokens, cfg.batch.tokens)
        if checking and neurons.check(saved, parallel.max_over_ranks, seed=cfg.seed, step=at.step):
            weights.refresh()
        at.step += 1
        at.tokens += cfg.batch.tokens
        watch.stop()
        profiler.step()
        tracker.progress(at.step)
        if nonfinite_in_a_row == cfg.max_nonfinite:
            raise UserError(f"{nonfinite_in_a_row} steps in a row were not finite (max_nonfinite); lower optim.lr")
        ending = stop or at.step == steps
        saving = ending or at.step % cfg.checkpoint.interval == 0

        # ---- Log: also before every checkpoint, so that a resumed run starts with empty sums.
        logging = saving or at.step % cfg.log.interval == 0
        if logging:
            meter.merge(parallel.sum_over_ranks)
            neurons.merge(parallel.max_over_ranks)
            seconds, n_steps = watch.take()
            at.train_seconds += seconds
            nats, l1, counted = totals.tolist()
            speed = n_steps * cfg.batch.tokens / seconds
            l1_width = cfg.model.n_layers * (cfg.ffn.d_ff if cfg.ffn.l1.norm == "mean" else 1)
            values = {
                "train/loss": nats / counted if counted else math.nan,
                "train/l1": l1 / counted / l1_width if counted else math.nan,
                **penalty.summary(),
                "train/lr": optimizers[0].param_groups[0]["lr"],
                "train/grad_norm": step.grad_norm.item(),
                "train/epoch": loader.epoch,
                "train/skipped_steps": at.skipped,
                "train/repeated_steps": at.repeated,
                "perf/tokens_per_second": speed,
                "perf/step_ms": 1e3 * seconds / n_steps,
                "perf/mfu": speed * model.flops_per_token() / (peak * ranks.world_size) if peak else None,
                "perf/data_wait_share": (loader.wait_seconds - waited) / seconds,
                "perf/host_read_share": step.host_read.take_seconds() / seconds,
                "perf/memory_gb": memory.used_gb(ranks.device),
                "perf/train_seconds": at.train_seconds,
            }
            if has_zeros:
                values |= meter.summary() | neurons.summary() | routing.metrics()
            values["perf/executed_flops"] = executed_share(model, values)
            tracker.record(at.step, at.tokens, values)
            eta = (steps - at.step) * seconds / n_steps
            log(console_line(at.step, steps, values, eta_seconds=eta, target_l0=cfg.ffn.l1.target_l0))
            totals.zero_()
            meter.reset()
            waited = loader.wait_seconds
            memory.collect_garbage()
        routing.after_step(logging)

        # ---- Validate.
        if at.step == steps or (at.step % cfg.eval.interval == 0 and not stop):
            watchdog.beat(at.step, "validating")
            val = validate_model(model, val_batches, token_bytes, routing, measures)
            if has_zeros:
                val |= measures.summary(tokenizer.decode, parallel.sum_over_ranks)
            at.val_loss, at.val_step = val["val/loss"], at.step
            if cfg.eval.sample_tokens and math.isfinite(at.val_loss):
                with gathered(model):
                    if ranks.is_main:
                        prompt, n_tokens = cfg.eval.prompt, cfg.eval.sample_tokens
                        val["val/sample"] = sample_text(model, tokenizer, prompt, n_tokens, cfg.seed)
            tracker.record(at.step, at.tokens, val | reference)
            log(validation_line(at.step, val | reference))

        # ---- Save.
        if saving and cfg.forced_nnz is None:  # else there is nothing to go on from
            at.note_checkpoint()
            meta = {
                "config": OmegaConf.to_container(cfg, resolve=True),
                "progress": asdict(at),
                "horizon_tokens": horizon_tokens,
                "loader": loader.state_dict(),
                "tokenizer": tokenizer.identity,
                "reference": reference,
                "wandb_id": tracker.wandb_id,
            }
            watchdog.beat(at.step, "saving")
            best = at.best_step if cfg.checkpoint.best else None
            saver.save(at.step, meta, routing.state_dict(), keep=cfg.checkpoint.keep, best=best, wait=ending)

    # ---- The end: all steps done, or asked to stop (the same command continues).
    if stop:
        log(f"stopped at step {at.step} of {steps}; the same command continues")
    parallel.finish()
    if stop:
        raise SystemExit(0)  # ends a sweep, too


if __name__ == "__main__":
    main()
