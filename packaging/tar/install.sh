#!/bin/sh
# Installs uniRDMA from the directory of this file, or removes it.
set -eu

usage() {
	cat <<-END
		Usage: ./install.sh [--prefix DIR] [--uninstall]

		Installs uniRDMA below DIR, /usr/local by default. With --uninstall it removes what it has installed, but
		neither a changed /etc/unirdma/host.toml nor state in /var/lib/unirdma.
		DESTDIR in the environment stands before all paths, for those who make packages.
	END
}

prefix=/usr/local
uninstall=
while [ $# -gt 0 ]
do
	case $1 in
	--prefix) [ $# -gt 1 ] || { usage >&2; exit 2; }; prefix=$2; shift ;;
	--prefix=*) prefix=${1#--prefix=} ;;
	--uninstall) uninstall=1 ;;
	--help | -h) usage; exit ;;
	*) echo "install.sh: there is no option $1" >&2; usage >&2; exit 2 ;;
	esac
	shift
done
case $prefix in
/*) ;;
*) echo "install.sh: --prefix $prefix has to begin with /" >&2; exit 2 ;;
esac

cd "$(dirname "$0")"
to=${DESTDIR:-}$prefix
config=${DESTDIR:-}/etc/unirdma/host.toml
# The service is root's, so an installation of another user in a directory of its own has none.
system=
if [ "$(id -u)" = 0 ] || [ -n "${DESTDIR:-}" ]; then system=1; fi
# Whether this is about the running system.
live=
if [ -n "$system" ] && [ -z "${DESTDIR:-}" ]; then live=1; fi

files() {
	find bin lib share ! -type d
}

units="unirdma-host.service unirdma-control.service"
if [ -n "$uninstall" ]
then
	if [ -n "$live" ] && [ -d /run/systemd/system ]
	then
		for unit in $units; do systemctl disable --now "$unit" 2>/dev/null || true; done
		systemctl kill --kill-who=all --signal=KILL unirdma-host.service 2>/dev/null || true
		systemctl reset-failed unirdma-host.service 2>/dev/null || true
	fi
	files | while read -r file; do rm -f "$to/$file"; done
	find bin lib share -depth -mindepth 1 -type d | while read -r dir; do rmdir "$to/$dir" 2>/dev/null || true; done
	if [ -n "$system" ]
	then
		for unit in $units; do rm -f "$to/lib/systemd/system/$unit"; done
		rm -f "$to/lib/sysusers.d/unirdma.conf" "$to/lib/sysusers.d/unirdma-control.conf" "$to/lib/tmpfiles.d/unirdma.conf"
		rmdir "$to/lib/systemd/system" "$to/lib/systemd" "$to/lib/sysusers.d" "$to/lib/tmpfiles.d" 2>/dev/null || true
		if cmp -s etc/unirdma/host.toml "$config"; then rm -f "$config"; fi
		rmdir "$(dirname "$config")" 2>/dev/null || true
	fi
	if [ -n "$live" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	echo "uniRDMA is removed from $to"
	exit
fi

files | while read -r file
do
	mkdir -p "$to/$(dirname "$file")"
	# A program that runs keeps its file.
	rm -f "$to/$file"
	cp -P "$file" "$to/$file"
done
if [ -n "$system" ]
then
	mkdir -p "$to/lib/systemd/system" "$to/lib/sysusers.d" "$to/lib/tmpfiles.d" "$(dirname "$config")"
	for unit in $units; do sed "s|/usr/bin/|$prefix/bin/|" "systemd/$unit" >"$to/lib/systemd/system/$unit"; done
	for name in unirdma unirdma-control; do cp "systemd/$name.sysusers" "$to/lib/sysusers.d/$name.conf"; done
	cp systemd/unirdma.tmpfiles "$to/lib/tmpfiles.d/unirdma.conf"
	[ -e "$config" ] || cp etc/unirdma/host.toml "$config"
fi
if [ -n "$live" ]
then
	if command -v systemd-sysusers >/dev/null
	then
		systemd-sysusers "$to/lib/sysusers.d/unirdma.conf" "$to/lib/sysusers.d/unirdma-control.conf"
	fi
	if [ -d /run/systemd/system ]
	then
		systemctl daemon-reload
		for unit in $units
		do
			if systemctl --quiet is-active "$unit"
			then echo "$unit runs the version that it was started with: systemctl restart $unit"
			fi
		done
	fi
fi
echo "uniRDMA is installed in $to"
