# Completion of ds2 for fish, by `ds2 completion fish`:
#     ds2 completion fish > ~/.config/fish/completions/ds2.fish
function __ds2_after
    set -l words (commandline -opc)
    set -l last (math 1 + (count $argv))
    test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"
end
# THE CASES OF ALL COMMANDS
