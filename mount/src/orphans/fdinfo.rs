//! What `/proc/PID/fdinfo/FD` tells of a descriptor.

use crate::mountinfo;

/// The lines of a descriptor's `fdinfo` that matter here.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FdInfo {
    /// The inode number of its file.
    pub ino: u64,
    /// Descriptors that wait in a socket, or in the connections it has not accepted.
    pub in_socket: u64,
    /// The names of files registered with a ring.
    pub in_ring: Vec<Vec<u8>>,
    /// It lists its registered files. A ring that is busy right now does not.
    pub is_listed: bool,
}

impl FdInfo {
    /// Reads it.
    pub fn parse(text: &str) -> FdInfo {
        let number = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        let is_listed = text.lines().any(|line| line.starts_with("UserFiles:"));
        let after = text.lines().skip_while(|line| !line.starts_with("UserFiles:")).skip(1);
        let files = after.map_while(|line| line.trim_start().split_once(": ")).filter(|(number, _)| is_number(number));
        FdInfo {
            ino: number("ino:"),
            in_socket: number("scm_fds:"),
            in_ring: files.map(|(_, path)| name_of(path)).collect(),
            is_listed,
        }
    }
}

fn is_number(text: &str) -> bool {
    text.parse::<u64>().is_ok()
}

/// The name of a file by the path the kernel shows.
fn name_of(path: &str) -> Vec<u8> {
    let path = mountinfo::unescape(path.trim_end().as_bytes()).into_os_string().into_encoded_bytes();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(&path);
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_matters_of_a_descriptor_is_read() {
        let file = "pos:\t0\nflags:\t02\nmnt_id:\t42\nino:\t4611686018427387905\n";
        assert_eq!(FdInfo::parse(file), FdInfo { ino: 4 << 60 | 1, ..FdInfo::default() });
        let socket = "pos:\t0\nflags:\t02000002\nmnt_id:\t10\nino:\t27\nscm_fds: 3\n";
        assert_eq!(FdInfo::parse(socket), FdInfo { ino: 27, in_socket: 3, ..FdInfo::default() });
        let ring = "pos:\t0\nSqMask:\t0x7\nUserFiles:\t3\n    0: /claims/a\\040b\\040(deleted)\n    1: <none>\n    2: k\n\
                    UserBufs:\t1\n    0: 0x7f/4096\n";
        let ring = FdInfo::parse(ring);
        assert_eq!(ring.in_ring, [b"a b".as_slice(), b"<none>", b"k"]);
        assert!(ring.is_listed && !FdInfo::parse(file).is_listed);
    }
}
