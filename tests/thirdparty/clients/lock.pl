# lock.pl hold|try PATH: flock by Perl's own function, as lock.py does.
use strict;
use warnings;
use Fcntl ':flock';

my ($verb, $path) = @ARGV;
open(my $file, '>>', $path) or do { warn "open: $!\n"; exit 1 };
flock($file, LOCK_EX | LOCK_NB) or do { warn "flock: $!\n"; exit 1 };
if ($verb eq 'hold') {
    $| = 1;
    print "held\n";
    sleep;
}
