#!/bin/bash
# Installs uniRDMA, starts a virtual layer with $VRNICS vRNICs, and lets the steps that follow find both. A part of
# action.yml. GitHub sets RUNNER_TEMP, GITHUB_PATH and GITHUB_ENV.
set -euo pipefail

case $VRNICS in
'' | *[!0-9]*) echo "vrnics: \`$VRNICS\` is not a number" >&2 && exit 1 ;;
esac
# Ubuntu 24.04 and later do not let ordinary users make namespaces. Where this fails, programs have no containers.
limit=/proc/sys/kernel/apparmor_restrict_unprivileged_userns
if [ -e $limit ] && [ "$(cat $limit)" = 1 ]; then
	sudo -n sysctl -q -w kernel.apparmor_restrict_unprivileged_userns=0 || true
fi
venv=$RUNNER_TEMP/unirdma-venv
dir=$RUNNER_TEMP/unirdma
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check "$PACKAGE"
mkdir -p "$dir"
unirdma=("$venv/bin/unirdma" --dir "$dir")
nohup "${unirdma[@]}" host >"$dir.log" 2>&1 &
host=$!
until "${unirdma[@]}" status >/dev/null 2>&1; do
	kill -0 $host 2>/dev/null || { cat "$dir.log" >&2 && exit 1; }
	sleep 0.1
done
for n in $(seq "$VRNICS"); do
	"${unirdma[@]}" vrnic add "v$n"
done
# The environment has other programs too, so only this one goes into the path.
mkdir -p "$RUNNER_TEMP/unirdma-bin"
ln -sf "$venv/bin/unirdma" "$RUNNER_TEMP/unirdma-bin/unirdma"
echo "$RUNNER_TEMP/unirdma-bin" >>"$GITHUB_PATH"
echo "UNIRDMA_HOST_DIR=$dir" >>"$GITHUB_ENV"
