"""Programs that an answer may run: those of the image whose results depend on files alone. Reasons to refuse others."""

import re
from collections.abc import Iterator, Sequence

from m2forge.pipelines.terminal.shell import SimpleCommand

_ALLOWED_NAMES = """
[ [[ : . alias break cd continue declare done echo eval exit export false for getopts hash in let local mapfile
popd printf pushd pwd read readarray readonly return select set shift shopt source test trap true type typeset umask
unalias unset wait
awk mawk base64 basename bash bzip2 bunzip2 bzcat cat chmod cksum cmp comm command cp csplit cut date dd diff diff3
dirname du egrep env expand expr fgrep file find fmt fold git grep gunzip gzip head hexdump id install join link ln
ls md5sum mkdir mv nice nl nohup od paste patch perl pr python python3 readlink realpath rev rm rmdir sed seq sh
sha1sum sha224sum sha256sum sha384sum sha512sum sleep sort split stat strings sum tac tail tar tee timeout touch
tr truncate tsort unexpand uniq unlink unxz wc xargs xz xzcat yes zcat zcmp zdiff zgrep dash
"""
ALLOWED = frozenset(_ALLOWED_NAMES.split())
"""Builtins of bash, and programs that Debian's image of Python has."""

_REFUSED = {
    "needs root or a service": """
        sudo su apt apt-get apt-cache apt-mark aptitude dpkg yum dnf rpm pacman snap systemctl service initctl mount
        umount modprobe insmod rmmod depmod useradd usermod userdel groupadd passwd chown chgrp chroot setsebool mkfs
        fdisk parted iptables ufw nft crontab at docker podman kubectl mysql mysqld_safe psql pg_dump mongo redis-cli
        nginx apachectl a2ensite ldconfig update-alternatives swapon swapoff losetup mkswap sysctl setcap setfacl
    """,
    "needs the network": """
        curl wget ssh ssh-keygen ssh-copy-id scp sftp rsync ping nc ncat netcat telnet ftp dig host nslookup traceroute
        pip pip3 npm gem cargo aws gcloud gh nmap openssl mail sendmail lynx
    """,
    "interactive or graphical program": """
        vim vi nvim nano emacs ed ex less more top htop tmux screen man info watch mc dialog whiptail gdb xrandr
        xdg-open nautilus gedit kate firefox chromium gsettings dconf nvidia-settings xclip xsel libreoffice soffice
        zenity
        notify-send import convert mogrify ffmpeg mplayer vlc gimp display tput stty reset clear
    """,
    "another system": """
        defaults brew launchctl pbcopy pbpaste open mdfind diskutil osascript sw_vers powershell pwsh cmd dir copy ren
        del xcopy robocopy attrib findstr wsl choco winget softwareupdate ditto
    """,
    "depends on the machine": """
        free ps kill killall pkill pgrep pidof lsof fuser netstat ss uptime lscpu lspci lsusb lsblk df who w whoami last
        uname hostname ip ifconfig dmesg smartctl hdparm vmstat iostat sensors acpi nproc arch tty groups users
        journalctl
    """,
    "random result": "shuf mktemp uuidgen pwgen apg makepasswd",
}
REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
NOT_IN_IMAGE = "program not in the image"
_GIT_NETWORK = frozenset(("push", "pull", "fetch", "clone", "remote", "submodule", "send-email", "credential"))
_RANDOM = re.compile(r"/dev/u?random|\$\{?RANDOM\b|\$\$|\bsrand\(|\brandom\.|\brand\(")
_MACHINE = re.compile(r"(?<![\w.])/(?:proc|sys|dev/(?!null|stdin|stdout|stderr|fd)|boot|var/log|etc|usr|home)/\w")
_HOME = re.compile(r"(?:^|[\s=:'\"])~/|\$HOME\b")


def refusals(commands: Sequence[SimpleCommand], script: str, defined: set[str]) -> Iterator[tuple[str, str]]:
    """Reasons not to run a script, each with the text that shows it. `defined`: functions and programs of the
    script."""
    for command in commands:
        name = command.program
        if name in REFUSED:
            yield REFUSED[name], name
        elif name == "git" and (verb := _git_verb(command)) in _GIT_NETWORK:
            yield "needs the network", f"git {verb}"
        elif name == "date" and not _is_fixed_date(command):
            yield "depends on the clock", " ".join(["date", *command.texts])
        elif name == "sed" and "" in command.texts:
            yield "another system", "sed -i ''"
        elif name and name not in ALLOWED and name not in defined and not name.startswith(("$", "./")):
            yield NOT_IN_IMAGE, name
    for reason, pattern in (("random result", _RANDOM), ("depends on the machine", _MACHINE)):
        if found := pattern.search(script):
            yield reason, found[0].strip()
    if found := _HOME.search(script):
        yield "depends on the machine", found[0].strip()


def is_known(name: str) -> bool:
    return name in ALLOWED or name in REFUSED


def _is_fixed_date(command: SimpleCommand) -> bool:
    """Whether it prints a time given by a file or the script, and not relative to now."""
    text = " ".join(command.texts)
    if re.search(r"(?:^| )(?:-[a-zA-Z]*r|--reference)", text):
        return True
    given = re.search(r"(?:^| )(?:-[a-zA-Z]*d ?|--date[= ])(.*)", text)
    return given is not None and bool(re.search(r"@|\$|\d{4}-?\d\d-?\d\d|\b\d{4}\b", given[1]))


def _git_verb(command: SimpleCommand) -> str:
    texts = command.texts
    while texts and texts[0].startswith("-"):
        texts = texts[2:] if texts[0] in ("-C", "-c") else texts[1:]
    return texts[0] if texts else ""
