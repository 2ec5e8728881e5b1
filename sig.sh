. /tmp/w/faults-tmp/env.sh
S=/tmp/w/faults-tmp/s; rm -rf $S; mkdir -p $S; cd /tmp/w/faults
P="--config.logging.progress=plain"
echo "== head -1"; (set -o pipefail; $T --workdir $S/head $P 2>$S/head.err | head -1; echo rc ${PIPESTATUS[0]}); tail -3 $S/head.err | cut -c1-300
echo "== stdout closed"; $T --workdir $S/closed $P >&- 2>$S/closed.err; echo rc $?; tail -3 $S/closed.err| cut -c1-300
echo "== both closed, stdin too"; $T --workdir $S/closed2 $P >&- 2>&- <&-; echo rc $?; ls $S/closed2
echo "== /dev/full"; $T --workdir $S/full $P >/dev/full 2>$S/full.err; echo rc $?; tail -3 $S/full.err| cut -c1-300
echo "== C locale"; LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii $T --workdir "$S/ü 日" $P >$S/c.out 2>$S/c.err; echo rc $?; tail -3 $S/c.err| cut -c1-300; tail -3 $S/c.out| cut -c1-300
echo "== cwd gone"; mkdir $S/gone; (cd $S/gone; rmdir $S/gone; $T --workdir $S/cwd >$S/g.out 2>$S/g.err; echo rc $?; tail -3 $S/g.err| cut -c1-300)
echo "== few files"; (ulimit -n 24; $T --workdir $S/nofile $P >$S/n.out 2>$S/n.err; echo rc $?; tail -3 $S/n.err| cut -c1-300)
echo "== no cuda"; JAX_PLATFORMS=cuda $T --workdir $S/cuda >$S/cu.out 2>$S/cu.err; echo rc $?; tail -3 $S/cu.err| cut -c1-300
echo "== JAX_PLATFORMS=foo"; JAX_PLATFORMS=foo $T --workdir $S/cuda >$S/cu.out 2>$S/cu.err; echo rc $?; tail -3 $S/cu.err| cut -c1-300
echo "== XLA_FLAGS wrong"; XLA_FLAGS=--xla_nonsense=1 $T --workdir $S/cuda >$S/cu.out 2>$S/cu.err; echo rc $?; tail -3 $S/cu.err| cut -c1-300
